"""The shape of sfujim/TD3: actor and twin critics, targets deep-copied, delayed policy updates, .data.copy_."""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Actor(nn.Module):
    def __init__(self, state_dim, action_dim, max_action):
        super().__init__()
        self.l1 = nn.Linear(state_dim, 24)
        self.l2 = nn.Linear(24, 24)
        self.l3 = nn.Linear(24, action_dim)
        self.max_action = max_action

    def forward(self, state):
        a = F.relu(self.l1(state))
        a = F.relu(self.l2(a))
        return self.max_action * torch.tanh(self.l3(a))


class Critic(nn.Module):
    def __init__(self, state_dim, action_dim):
        super().__init__()
        self.l1 = nn.Linear(state_dim + action_dim, 24)
        self.l2 = nn.Linear(24, 1)
        self.l4 = nn.Linear(state_dim + action_dim, 24)
        self.l5 = nn.Linear(24, 1)

    def forward(self, state, action):
        sa = torch.cat([state, action], 1)
        return self.l2(F.relu(self.l1(sa))), self.l5(F.relu(self.l4(sa)))

    def Q1(self, state, action):
        return self.l2(F.relu(self.l1(torch.cat([state, action], 1))))


class ReplayBuffer:
    def __init__(self, state_dim, action_dim, max_size=500):
        self.max_size, self.ptr, self.size = max_size, 0, 0
        self.state = np.zeros((max_size, state_dim))
        self.action = np.zeros((max_size, action_dim))
        self.next_state = np.zeros((max_size, state_dim))
        self.reward = np.zeros((max_size, 1))
        self.not_done = np.zeros((max_size, 1))

    def add(self, state, action, next_state, reward, done):
        self.state[self.ptr], self.action[self.ptr], self.next_state[self.ptr] = state, action, next_state
        self.reward[self.ptr], self.not_done[self.ptr] = reward, 1.0 - done
        self.ptr = (self.ptr + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def sample(self, batch_size):
        ind = np.random.randint(0, self.size, size=batch_size)
        return [
            torch.FloatTensor(a[ind]) for a in (self.state, self.action, self.next_state, self.reward, self.not_done)
        ]


torch.manual_seed(0)
np.random.seed(0)
actor = Actor(3, 1, 2.0)
critic = Critic(3, 1)
# farspan: actor, critic = farspan.distribute(nn.ModuleList([actor, critic]))
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
replay_buffer = ReplayBuffer(3, 1)
discount, tau, policy_noise, noise_clip, policy_freq = 0.99, 0.05, 0.2, 0.5, 2


def train(total_it):
    state, action, next_state, reward, not_done = replay_buffer.sample(16)
    with torch.no_grad():
        noise = (torch.randn_like(action) * policy_noise).clamp(-noise_clip, noise_clip)
        next_action = (actor_target(next_state) + noise).clamp(-2.0, 2.0)
        target_Q1, target_Q2 = critic_target(next_state, next_action)
        target_Q = reward + not_done * discount * torch.min(target_Q1, target_Q2)
    current_Q1, current_Q2 = critic(state, action)
    critic_loss = F.mse_loss(current_Q1, target_Q) + F.mse_loss(current_Q2, target_Q)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    if total_it % policy_freq == 0:
        actor_loss = -critic.Q1(state, actor(state)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        for param, target_param in zip(critic.parameters(), critic_target.parameters()):
            target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)
        for param, target_param in zip(actor.parameters(), actor_target.parameters()):
            target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)
    return critic_loss.item()


rewards = []
for episode in range(3):
    theta, speed, total = np.random.uniform(-1, 1), 0.0, 0.0
    for t in range(12):
        state = np.array([np.cos(theta), np.sin(theta), speed])
        with torch.no_grad():
            action = actor(torch.FloatTensor(state.reshape(1, -1))).cpu().data.numpy().flatten()
        action = (action + np.random.normal(0, 0.2, size=1)).clip(-2, 2)
        speed += 0.1 * (action[0] + np.sin(theta))
        theta += 0.1 * speed
        reward = -(theta**2 + 0.1 * speed**2)
        next_state = np.array([np.cos(theta), np.sin(theta), speed])
        replay_buffer.add(state, action, next_state, reward, float(t == 11))
        total += reward
        if replay_buffer.size >= 8:
            loss = train(replay_buffer.ptr)
    rewards.append(total)
    print(f"Episode Num: {episode + 1} Reward: {total:.6f} critic {loss:.8f}")
np.save("rewards.npy", rewards)
for name, part in (
    ("actor", actor),
    ("critic", critic),
    ("actor_target", actor_target),
    ("critic_target", critic_target),
):
    torch.save(part.state_dict(), f"TD3_{name}")
torch.save(critic_optimizer.state_dict(), "TD3_critic_optimizer")
