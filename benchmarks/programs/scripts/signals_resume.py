"""A trainer that is told by SIGUSR1 and SIGALRM to save, stops itself, is resumed in the same script, and goes on with its generators."""

import os
import random
import signal
import threading

import numpy as np
import torch
import torch.nn as nn


class Trainer:
    def __init__(self, model, path):
        self.model, self.path, self.stop, self.step, self.saved = model, path, False, 0, []
        self.opt = torch.optim.NAdam(model.parameters(), lr=3e-3)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=1e-2, total_steps=20)
        signal.signal(signal.SIGUSR1, self.on_signal)

    def on_signal(self, num, frame):
        self.stop = True

    def save(self):
        tmp = self.path + ".tmp"
        state = {
            "model": self.model.state_dict(),
            "opt": self.opt.state_dict(),
            "sched": self.sched.state_dict(),
            "step": self.step,
            "rng": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
        }
        with open(tmp, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, self.path)

    def load(self):
        state = torch.load(self.path, weights_only=False, map_location="cpu")
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"][0]), np.random.set_state(state["rng"][1]), random.setstate(state["rng"][2])

    def run(self, n):
        while self.step < n and not self.stop:
            x = torch.from_numpy(np.random.randn(8, 5).astype("f4")) * random.choice([0.5, 1.0, 2.0])
            loss = (self.model(x).squeeze(-1) - x.sum(1)).pow(2).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.sched.step()
            self.step += 1
            print(f"step {self.step} loss {loss.item():.10f} lr {self.sched.get_last_lr()[0]:.8f}")
            if self.step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
            if self.step % 5 == 0:
                t = threading.Thread(
                    target=lambda s={k: v.clone() for k, v in self.model.state_dict().items()}, n=self.step: torch.save(
                        s, f"async{n}.pt"
                    )
                )
                t.start()
                self.saved.append(t)
        self.save()
        for t in self.saved:
            t.join()


def build():
    return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.1), nn.SELU(), nn.Linear(16, 16), nn.SELU(), nn.Linear(16, 1))


random.seed(0), np.random.seed(0), torch.manual_seed(0)
model = build()
# farspan: model = farspan.distribute(model)
t = Trainer(model, "last.pt")
t.run(10)
print("stopped at", t.step, os.path.exists("last.pt"), sorted(os.listdir(".")))
with torch.no_grad():
    for p in model.parameters():
        p.zero_()
random.seed(99), torch.manual_seed(99)
t2 = Trainer(model, "last.pt")
t2.load()
t2.run(10)
print("done", t2.step, signal.getsignal(signal.SIGUSR1) == t2.on_signal, sorted(os.listdir(".")))
