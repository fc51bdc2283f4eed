"""Deep Q-learning with a memory of transitions and a target network that follows slowly, in a Python environment."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from parts.log import Log

BATCH_SIZE, GAMMA, EPS_START, EPS_END, EPS_DECAY, TAU, LR = 16, 0.95, 0.9, 0.05, 40, 0.05, 1e-2
SIZE, EPISODES, MAX_STEPS = 4, 6, 12


class Transition(NamedTuple):
    state: Tensor
    action: Tensor
    next_state: Tensor | None
    reward: Tensor


class Batch(NamedTuple):
    state: tuple[Tensor, ...]
    action: tuple[Tensor, ...]
    next_state: tuple[Tensor | None, ...]
    reward: tuple[Tensor, ...]


class ReplayMemory:
    def __init__(self, capacity: int) -> None:
        self.memory: deque[Transition] = deque(maxlen=capacity)

    def push(self, *parts) -> None:
        self.memory.append(Transition(*parts))

    def sample(self, batch_size: int) -> list[Transition]:
        return random.sample(self.memory, batch_size)

    def __len__(self) -> int:
        return len(self.memory)


class Grid:
    """A field of a chess board; the goal is in a corner. A state is (row, column), from 0 to 1."""

    def reset(self) -> list[float]:
        self.row, self.column = random.randrange(SIZE - 1), random.randrange(SIZE - 1)
        return self.state()

    def state(self) -> list[float]:
        return [self.row / SIZE, self.column / SIZE]

    def step(self, action: int) -> tuple[list[float], float, bool]:
        down, right = ((-1, 0), (1, 0), (0, -1), (0, 1))[action]
        self.row = min(max(self.row + down, 0), SIZE - 1)
        self.column = min(max(self.column + right, 0), SIZE - 1)
        is_there = self.row == self.column == SIZE - 1
        return self.state(), 1.0 if is_there else -0.1, is_there


class DQN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(2, 32)
        self.layer2 = nn.Linear(32, 32)
        self.layer3 = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        return self.layer3(x)


def select_action(state: Tensor) -> Tensor:
    global steps_done
    threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    steps_done += 1
    if random.random() > threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(4)]], dtype=torch.long)


def optimize_model() -> None:
    if len(memory) < BATCH_SIZE:
        return
    batch = Batch(*zip(*memory.sample(BATCH_SIZE), strict=True))
    non_final_mask = torch.tensor([s is not None for s in batch.next_state], dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_batch = torch.cat(batch.state)
    action_batch = torch.cat(batch.action)
    reward_batch = torch.cat(batch.reward)
    state_action_values = policy_net(state_batch).gather(1, action_batch)
    next_state_values = torch.zeros(BATCH_SIZE)
    with torch.no_grad():
        next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
    expected_state_action_values = (next_state_values * GAMMA) + reward_batch
    loss = F.smooth_l1_loss(state_action_values, expected_state_action_values.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    losses.append(loss.item())


torch.manual_seed(0)
random.seed(0)
policy_net, target_net = DQN(), DQN()
# farspan: policy_net, target_net = farspan.distribute(nn.ModuleList([policy_net, target_net]))
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
memory, env, log = ReplayMemory(200), Grid(), Log()
steps_done, losses = 0, [0.0]
for episode in range(EPISODES):
    state = torch.tensor(env.reset(), dtype=torch.float32).unsqueeze(0)
    for _ in range(MAX_STEPS):
        action = select_action(state)
        observation, reward, done = env.step(int(action.item()))
        next_state = None if done else torch.tensor(observation, dtype=torch.float32).unsqueeze(0)
        memory.push(state, action, next_state, torch.tensor([reward]))
        state = next_state
        optimize_model()
        target_net_state_dict = target_net.state_dict()
        policy_net_state_dict = policy_net.state_dict()
        for key in policy_net_state_dict:
            target_net_state_dict[key] = policy_net_state_dict[key] * TAU + target_net_state_dict[key] * (1 - TAU)
        target_net.load_state_dict(target_net_state_dict)
        if state is None:
            break
    log.show(f"episode {episode}", steps=steps_done, loss=losses[-1])
log.finish(policy_net, target_net)
