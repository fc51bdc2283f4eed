"""PPO (CleanRL) with observation statistics in buffers, rollouts recorded in tensors by index, KL early stop, GAE."""

import random

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class RunningNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("var", torch.ones(n))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, x):
        bm, bv, bc = x.mean(0), x.var(0, unbiased=False), x.shape[0]
        delta, tot = bm - self.mean, self.count + bc
        self.mean = self.mean + delta * bc / tot
        self.var = (self.var * self.count + bv * bc + delta**2 * self.count * bc / tot) / tot
        self.count = tot

    def forward(self, x):
        if self.training:
            self.update(x)
        return ((x - self.mean) / torch.sqrt(self.var + 1e-8)).clamp(-10, 10)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RunningNorm(3)
        self.critic = nn.Sequential(layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 3), std=0.01))

    def get_value(self, x):
        return self.critic(self.norm(x))

    def get_action_and_value(self, x, action=None):
        x = self.norm(x)
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


random.seed(2), np.random.seed(2), torch.manual_seed(2)
agent = Agent()
# farspan: agent = farspan.distribute(agent)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
T, N = 8, 4
obs, actions = torch.zeros((T, N, 3)), torch.zeros((T, N))
logprobs, rewards, dones, values = (torch.zeros((T, N)) for _ in range(4))
next_obs, next_done = torch.Tensor(np.random.randn(N, 3)), torch.zeros(N)
for update in range(1, 4):
    optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / 3) * 2.5e-3
    for step in range(T):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step], logprobs[step] = action, logprob
        a = action.cpu().numpy()
        x = 0.9 * next_obs.numpy() + 0.3 * np.eye(3)[a] + 0.05 * np.random.randn(N, 3)
        rewards[step] = torch.tensor(-np.abs(x).sum(1)).view(-1)
        next_obs, next_done = torch.Tensor(x), torch.Tensor((np.abs(x).sum(1) > 2.5).astype(np.float32))
    with torch.no_grad():
        next_value = agent.get_value(next_obs).reshape(1, -1)
        advantages, lastgaelam = torch.zeros_like(rewards), 0
        for t in reversed(range(T)):
            nonterm = 1.0 - (next_done if t == T - 1 else dones[t + 1])
            nextv = next_value if t == T - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * nextv * nonterm - values[t]
            advantages[t] = lastgaelam = delta + 0.99 * 0.95 * nonterm * lastgaelam
        returns = advantages + values
    b = [x.reshape((-1, *x.shape[2:])) for x in (obs, logprobs, actions, advantages, returns, values)]
    b_inds, clipfracs = np.arange(T * N), []
    for epoch in range(3):
        np.random.shuffle(b_inds)
        for start in range(0, T * N, 16):
            mb = b_inds[start : start + 16]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b[0][mb], b[2].long()[mb])
            logratio = newlogprob - b[1][mb]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfracs += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
            adv = b[3][mb]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            newvalue = newvalue.view(-1)
            v_clipped = b[5][mb] + torch.clamp(newvalue - b[5][mb], -0.2, 0.2)
            v_loss = 0.5 * torch.max((newvalue - b[4][mb]) ** 2, (v_clipped - b[4][mb]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        if approx_kl > 0.03:
            print("early stop", epoch)
            break
    y_pred, y_true = b[5].cpu().numpy(), b[4].cpu().numpy()
    ev = 1 - np.var(y_true - y_pred) / np.var(y_true)
    print(update, loss.item(), v_loss.item(), approx_kl.item(), np.mean(clipfracs), ev, agent.norm.count.item())
