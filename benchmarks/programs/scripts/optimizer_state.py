"""The optimizer's state between steps: moments read for a log, reset for rows of new words, pickled; the step counted."""

import pickle

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 10)
        self.rnn = nn.RNN(10, 16, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 20)

    def forward(self, ids):
        return self.out(self.drop(self.rnn(self.emb(ids))[0]))


torch.manual_seed(55)
ids = (torch.arange(12) + torch.randint(0, 20, (60, 1))) % 20
model = Model()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, amsgrad=True)


def train(n):
    for _ in range(n):
        batch = ids[torch.randint(0, 60, (12,))]
        loss = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


for phase in range(3):
    print("loss", train(3))
    moments = {n: optimizer.state[p]["exp_avg_sq"].sqrt().mean().item() for n, p in model.named_parameters()}
    print("  second moments", {n: f"{v:.3e}" for n, v in moments.items()})
    snr = [(s["exp_avg"].abs() / (s["exp_avg_sq"].sqrt() + 1e-8)).mean().item() for s in optimizer.state.values()]
    print("  signal", [f"{v:.5f}" for v in snr], "steps", sorted({int(s["step"]) for s in optimizer.state.values()}))
    with torch.no_grad():
        model.emb.weight[phase * 2 : phase * 2 + 2].normal_(0, 0.1)
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[model.emb.weight][key][phase * 2 : phase * 2 + 2] = 0
with open("optimizer.pkl", "wb") as f:
    pickle.dump(optimizer.state_dict(), f)
with open("optimizer.pkl", "rb") as f:
    optimizer.load_state_dict(pickle.load(f))
print("after pickle", train(2), len(optimizer.state))
for p in list(optimizer.state):
    del optimizer.state[p]
print("after reset", train(2), len(optimizer.state))
size = sum(t.numel() for s in optimizer.state_dict()["state"].values() for t in s.values() if torch.is_tensor(t))
print("numbers in the state", size)
torch.save(model.state_dict(), "model.pt")
