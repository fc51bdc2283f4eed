"""Dreamer's world model in small: GRU cell over time, stochastic states, balanced KL with free nats, imagination, lambda returns, slow critic."""

import copy

import torch
import torch.distributions as td
import torch.nn as nn
import torch.nn.functional as F


class RSSM(nn.Module):
    def __init__(self, a, e, s=4, d=8):
        super().__init__()
        self.s, self.d = s, d
        self.inp, self.cell = nn.Linear(s + a, d), nn.GRUCell(d, d)
        self.prior, self.post = nn.Linear(d, 2 * s), nn.Linear(d + e, 2 * s)

    def initial(self, b):
        return {
            "mean": torch.zeros(b, self.s),
            "std": torch.ones(b, self.s),
            "stoch": torch.zeros(b, self.s),
            "deter": torch.zeros(b, self.d),
        }

    def _dist(self, stats):
        mean, std = stats.chunk(2, -1)
        std = F.softplus(std) + 0.1
        return {"mean": mean, "std": std, "stoch": td.Independent(td.Normal(mean, std), 1).rsample()}

    def img_step(self, state, a):
        deter = self.cell(F.elu(self.inp(torch.cat([state["stoch"], a], -1))), state["deter"])
        return {**self._dist(self.prior(deter)), "deter": deter}

    def obs_step(self, state, a, e):
        prior = self.img_step(state, a)
        return {**self._dist(self.post(torch.cat([prior["deter"], e], -1))), "deter": prior["deter"]}, prior

    def observe(self, e, a):
        state, posts, priors = self.initial(e.size(0)), [], []
        for t in range(e.size(1)):
            state, prior = self.obs_step(state, a[:, t], e[:, t])
            posts.append(state)
            priors.append(prior)
        stack = lambda xs: {k: torch.stack([x[k] for x in xs], 1) for k in xs[0]}
        return stack(posts), stack(priors)


def dist(s):
    return td.Independent(td.Normal(s["mean"], s["std"]), 1)


def feat(s):
    return torch.cat([s["stoch"], s["deter"]], -1)


class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rssm = nn.Sequential(nn.Linear(5, 8), nn.ELU(), nn.Linear(8, 6)), RSSM(2, 6)
        self.decoder, self.reward = nn.Sequential(nn.Linear(12, 8), nn.ELU(), nn.Linear(8, 5)), nn.Linear(12, 1)
        self.actor, self.value = nn.Linear(12, 4), nn.Sequential(nn.Linear(12, 8), nn.ELU(), nn.Linear(8, 1))


torch.manual_seed(13)
w = World()
# farspan: w = farspan.distribute(w)
slow = copy.deepcopy(w.value)
model_params = [p for n in ("encoder", "rssm", "decoder", "reward") for p in getattr(w, n).parameters()]
opts = {
    "model": torch.optim.Adam(model_params, lr=3e-3),
    "actor": torch.optim.Adam(w.actor.parameters(), lr=1e-3),
    "value": torch.optim.Adam(w.value.parameters(), lr=1e-3),
}
for it in range(4):
    obs, act, rew = torch.randn(3, 4, 5), torch.randn(3, 4, 2).tanh(), torch.randn(3, 4)
    post, prior = w.rssm.observe(w.encoder(obs), act)
    f = feat(post)
    sg = lambda s: {k: v.detach() for k, v in s.items()}
    kl_l = td.kl_divergence(dist(post), dist(sg(prior))).mean()
    kl_r = td.kl_divergence(dist(sg(post)), dist(prior)).mean()
    kl = 0.2 * torch.maximum(kl_l, torch.tensor(0.5)) + 0.8 * torch.clamp(kl_r, min=0.5)
    model_loss = (
        -td.Independent(td.Normal(w.decoder(f), 1.0), 1).log_prob(obs).mean()
        + F.mse_loss(w.reward(f).squeeze(-1), rew)
        + kl
    )
    opts["model"].zero_grad()
    model_loss.backward()
    nn.utils.clip_grad_norm_(model_params, 10.0)
    opts["model"].step()
    state = {k: v.detach().flatten(0, 1) for k, v in post.items()}
    for p in model_params:
        p.requires_grad_(False)
    feats, ents = [feat(state)], []
    for _ in range(3):
        m, s = w.actor(feats[-1].detach()).chunk(2, -1)
        pol = td.Independent(td.Normal(m.tanh(), F.softplus(s) + 0.1), 1)
        state = w.rssm.img_step(state, pol.rsample())
        feats.append(feat(state))
        ents.append(pol.entropy())
    feats = torch.stack(feats)
    r, v = w.reward(feats).squeeze(-1), slow(feats).squeeze(-1)
    last, rets = v[-1], []
    for t in reversed(range(3)):
        last = r[t] + 0.95 * (0.05 * v[t + 1] + 0.95 * last)
        rets.append(last)
    rets = torch.stack(rets[::-1])
    actor_loss = -(rets + 1e-3 * torch.stack(ents)).mean()
    opts["actor"].zero_grad()
    actor_loss.backward()
    opts["actor"].step()
    for p in model_params:
        p.requires_grad_(True)
    value_loss = F.mse_loss(w.value(feats[:-1].detach()).squeeze(-1), rets.detach())
    opts["value"].zero_grad()
    value_loss.backward()
    opts["value"].step()
    if it % 2 == 1:
        for s, d in zip(w.value.parameters(), slow.parameters()):
            d.data = 0.5 * s.data + 0.5 * d.data
    print(
        it,
        model_loss.item(),
        kl.item(),
        actor_loss.item(),
        value_loss.item(),
        sum(p.sum().item() for p in slow.parameters()),
    )
