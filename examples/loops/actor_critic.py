"""Actor-critic on a pole that wants to fall: a Python environment, an action drawn and read at every time step."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from parts.log import Log

GAMMA, EPISODES, MAX_STEPS = 0.99, 6, 30


class SavedAction(NamedTuple):
    log_prob: Tensor
    value: Tensor


class Pole:
    """A pole on a cart: the state is (position, speed, angle, turning speed), a push goes left or right."""

    def reset(self) -> list[float]:
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        x, speed, angle, turning = self.state
        push = (10.0 if action == 1 else -10.0) + 0.05 * turning**2 * math.sin(angle)
        bend = (9.8 * math.sin(angle) - math.cos(angle) * push / 1.1) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2))
        gain = (push - 0.05 * bend * math.cos(angle)) / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turning, turning + 0.02 * bend]
        return self.state, 1.0, abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21


class Policy(nn.Module):
    """Actor and critic in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 64)
        self.action_head = nn.Linear(64, 2)
        self.value_head = nn.Linear(64, 1)
        self.saved_actions: list[SavedAction] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def select_action(state: list[float]) -> int:
    probs, state_value = model(torch.tensor(state))
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action), state_value))
    return int(action.item())


def finish_episode() -> float:
    """Trains on what the episode has left."""
    ret, returns = 0.0, []
    for r in model.rewards[::-1]:
        ret = r + GAMMA * ret
        returns.insert(0, ret)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_losses, value_losses = [], []
    for (log_prob, value), ret in zip(model.saved_actions, returns, strict=True):
        advantage = ret - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([ret])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]
    return loss.item()


torch.manual_seed(543)
random.seed(543)
env = Pole()
model = Policy()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
log = Log()
running_reward = 10.0
for episode in range(EPISODES):
    state, ep_reward = env.reset(), 0.0
    for _ in range(MAX_STEPS):
        state, reward, done = env.step(select_action(state))
        model.rewards.append(reward)
        ep_reward += reward
        if done:
            break
    running_reward = 0.05 * ep_reward + 0.95 * running_reward
    log.show(f"episode {episode}", loss=finish_episode(), reward=ep_reward, average=running_reward)
log.finish(model)
