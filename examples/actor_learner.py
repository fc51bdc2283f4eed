"""Actors play CartPole, a learner over two ranks trains the policy (advantage actor-critic), until the pole stays up.

    pip install gymnasium
    farspan run --role actor=2 --role learner=2 --max-restarts 10 examples/actor_learner.py

The learner's first rank has the hub: actors add episodes to it and take the newest policy from it. The learner's model
is distributed over its ranks; the batch, which only the first one has, comes to the others by `farspan.from_rank`.
"""

from __future__ import annotations

import argparse
import collections
import os
import threading
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import farspan

DISCOUNT = 0.99
Episode = dict[str, Tensor]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actions = nn.Linear(64, 2)
        self.value = nn.Linear(64, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(states)
        return self.actions(features), self.value(features).squeeze(-1)


class Hub:
    """What actors and learner have in common; old episodes are dropped."""

    def __init__(self) -> None:
        self._episodes: collections.deque[Episode] = collections.deque(maxlen=64)
        self._has_more = threading.Condition()
        self._weights: dict[str, Tensor] = {}
        self.lengths: collections.deque[int] = collections.deque(maxlen=40)

    def publish(self, weights: dict[str, Tensor]) -> None:
        self._weights = {name: value.clone() for name, value in weights.items()}

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def add(self, episode: Episode) -> dict[str, Tensor]:
        """Takes an episode; returns the newest policy."""
        with self._has_more:
            self._episodes.append(episode)
            self.lengths.append(len(episode["actions"]))
            self._has_more.notify()
        return self._weights

    def take(self, num_steps: int) -> Episode:
        """Waits for so many steps of episodes, and returns them."""
        parts: list[Episode] = []
        with self._has_more:
            while sum(len(part["actions"]) for part in parts) < num_steps:
                if not self._has_more.wait_for(lambda: bool(self._episodes), timeout=120):
                    raise TimeoutError("no actor has added an episode for two minutes")
                parts.append(self._episodes.popleft())
        return {name: torch.cat([part[name] for part in parts])[:num_steps] for name in parts[0]}


def play(environment: Any, policy: Policy, seed: int | None) -> Episode:
    """Returns an episode: states, actions, and what came of each."""
    state, _ = environment.reset(seed=seed)
    states, actions, is_over = [], [], False
    while not is_over:
        states.append(torch.from_numpy(state))
        with torch.no_grad():
            logits, _ = policy(states[-1])
        actions.append(int(torch.multinomial(logits.softmax(dim=-1), 1)))
        state, _, has_fallen, is_long, _ = environment.step(actions[-1])
        is_over = has_fallen or is_long
    with torch.no_grad():  # one that has not fallen would have gone on
        gained, gains = 0.0 if has_fallen else policy(torch.from_numpy(state))[1].item(), []
    for _ in actions:
        gained = 1.0 + DISCOUNT * gained
        gains.append(gained)
    return {
        "states": torch.stack(states),
        "actions": torch.tensor(actions),
        "gains": torch.tensor(gains[::-1]),
    }


def act(seed: int) -> None:
    """Plays until the run is over."""
    number = seed + farspan.rank() + 100 * int(os.environ.get("FARSPAN_RESTART", "0"))
    torch.manual_seed(number)
    hub, policy, environment = farspan.service("hub"), Policy(), gymnasium.make("CartPole-v1")
    policy.load_state_dict(hub.weights())
    first: int | None = number
    while True:
        policy.load_state_dict(hub.add(play(environment, policy, first)))
        first = None


def learn(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    is_first, hub = farspan.rank() == 0, Hub()
    model = farspan.distribute(Policy(), measure=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    if is_first:
        hub.publish(model.state_dict())
        farspan.expose("hub", hub, methods=["weights", "add"])
    for update in range(1, args.updates + 1):
        batch = farspan.from_rank(0, hub.take(args.steps) if is_first else None)
        logits, values = model(batch["states"])
        advantages = (batch["gains"] - values).detach()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        chosen = logits.log_softmax(dim=-1).gather(1, batch["actions"][:, None]).squeeze(1)
        entropy = -(logits.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
        loss = -(advantages * chosen).mean() + 0.005 * F.smooth_l1_loss(values, batch["gains"]) - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_first:
            hub.publish(model.state_dict())
        mean = farspan.from_rank(0, sum(hub.lengths) / len(hub.lengths) if is_first else None)
        if update % 10 == 0 or mean >= args.goal:
            print(f"update {update}: the pole stays up for {mean:.0f} steps")
        if mean >= args.goal:
            return
    raise SystemExit(f"the pole has not stayed up for {args.goal} steps after {args.updates} updates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", type=float, default=300, help="steps, the mean of the last 40 episodes; at most 500")
    parser.add_argument("--updates", type=int, default=1000, help="at most")
    parser.add_argument("--steps", type=int, default=512, help="of episodes in a batch")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    act(args.seed) if farspan.role() == "actor" else learn(args)


if __name__ == "__main__":
    main()
