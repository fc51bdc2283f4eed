"""The shape of vwxyzjn/cleanrl ppo.py: rollouts into plain tensors, GAE, minibatches, clipped losses, annealed lr."""

import random

import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(4, 16)),
            nn.Tanh(),
            layer_init(nn.Linear(16, 16)),
            nn.Tanh(),
            layer_init(nn.Linear(16, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(4, 16)),
            nn.Tanh(),
            layer_init(nn.Linear(16, 16)),
            nn.Tanh(),
            layer_init(nn.Linear(16, 2), std=0.01),
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


class Cart:
    """A cart to be kept in the middle, several at once."""

    def __init__(self, n):
        self.state = np.random.uniform(-0.5, 0.5, (n, 4)).astype(np.float32)

    def step(self, action):
        self.state[:, 1] += 0.2 * (2 * action - 1)
        self.state[:, 0] += 0.1 * self.state[:, 1]
        self.state[:, 2:] = 0.9 * self.state[:, 2:] + 0.1 * np.random.randn(len(action), 2)
        done = np.abs(self.state[:, 0]) > 1
        self.state[done] = 0
        return self.state.copy(), (1 - np.abs(self.state[:, 0])).astype(np.float32), done.astype(np.float32)


random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
num_envs, num_steps, num_updates, gamma, gae_lambda, clip_coef = 4, 8, 3, 0.99, 0.95, 0.2
envs = Cart(num_envs)
agent = Agent()
# farspan: agent = farspan.distribute(agent)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
obs = torch.zeros((num_steps, num_envs, 4))
actions = torch.zeros((num_steps, num_envs))
logprobs, rewards, dones, values = (torch.zeros((num_steps, num_envs)) for _ in range(4))
next_obs, next_done = torch.Tensor(envs.state.copy()), torch.zeros(num_envs)
for update in range(1, num_updates + 1):
    optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / num_updates) * 2.5e-3
    for step in range(num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step], logprobs[step] = action, logprob
        observation, reward, done = envs.step(action.cpu().numpy())
        rewards[step] = torch.tensor(reward).view(-1)
        next_obs, next_done = torch.Tensor(observation), torch.Tensor(done)
    with torch.no_grad():
        next_value = agent.get_value(next_obs).reshape(1, -1)
        advantages = torch.zeros_like(rewards)
        lastgaelam = 0
        for t in reversed(range(num_steps)):
            nextnonterminal = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            nextvalues = next_value if t == num_steps - 1 else values[t + 1]
            delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
            advantages[t] = lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
        returns = advantages + values
    b_obs, b_logprobs, b_actions = obs.reshape(-1, 4), logprobs.reshape(-1), actions.reshape(-1)
    b_advantages, b_returns, b_values = advantages.reshape(-1), returns.reshape(-1), values.reshape(-1)
    b_inds, clipfracs = np.arange(num_envs * num_steps), []
    for epoch in range(2):
        np.random.shuffle(b_inds)
        for start in range(0, len(b_inds), 16):
            mb = b_inds[start : start + 16]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions.long()[mb])
            logratio = newlogprob - b_logprobs[mb]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfracs += [((ratio - 1.0).abs() > clip_coef).float().mean().item()]
            mb_adv = b_advantages[mb]
            mb_adv = (mb_adv - mb_adv.mean()) / (mb_adv.std() + 1e-8)
            pg_loss = torch.max(-mb_adv * ratio, -mb_adv * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)).mean()
            newvalue = newvalue.view(-1)
            v_clipped = b_values[mb] + torch.clamp(newvalue - b_values[mb], -clip_coef, clip_coef)
            v_loss = 0.5 * torch.max((newvalue - b_returns[mb]) ** 2, (v_clipped - b_returns[mb]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
    explained_var = 1 - np.var(y_true - y_pred) / np.var(y_true)
    print(
        f"update {update} v {v_loss.item():.6f} pg {pg_loss.item():.7f} kl {approx_kl.item():.7f} "
        f"clip {np.mean(clipfracs):.4f} ev {explained_var:.6f} return {rewards.sum().item():.5f}"
    )
torch.save(agent.state_dict(), "ppo.cleanrl_model")
