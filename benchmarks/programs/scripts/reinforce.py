"""The shape of pytorch/examples/reinforcement_learning/reinforce.py: log probabilities kept as an attribute of the policy."""

from collections import deque

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 24)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(24, 24)
        self.affine3 = nn.Linear(24, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        x = self.dropout(self.affine1(x))
        return F.softmax(self.affine3(F.relu(self.affine2(F.relu(x)))), dim=1)


class Pole:
    def reset(self):
        self.state = np.random.uniform(-0.05, 0.05, 4)
        return self.state

    def step(self, action):
        x, v, angle, turn = self.state
        force = 1.0 if action == 1 else -1.0
        turn += 0.2 * (np.sin(angle) - 0.5 * force)
        self.state = np.array([x + 0.1 * v, v + 0.1 * force, angle + 0.1 * turn, turn])
        return self.state, 1.0, bool(abs(self.state[2]) > 0.3)


policy = Policy()
# farspan: policy = farspan.distribute(policy)
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
eps = np.finfo(np.float32).eps.item()
env = Pole()


def select_action(state):
    state = torch.from_numpy(state).float().unsqueeze(0)
    probs = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R = 0
    policy_loss = []
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]
    return policy_loss.item()


running_reward = 10
for i_episode in range(5):
    state, ep_reward = env.reset(), 0
    for _ in range(1, 15):
        action = select_action(state)
        state, reward, done = env.step(action)
        policy.rewards.append(reward)
        ep_reward += reward
        if done:
            break
    running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
    loss = finish_episode()
    print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage: {running_reward:.2f}\tLoss: {loss:.7f}")
torch.save(policy.state_dict(), "policy.pt")
