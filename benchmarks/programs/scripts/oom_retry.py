"""A loop that halves its batch when the model runs out of memory, and goes on: the exception is the model's own."""

import torch
import torch.nn.functional as F
from torch import nn


class Memory(nn.Module):
    """Stands for a device that holds so many activations and no more."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        if x.shape[0] * x.shape[1] > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {x.numel() * 4} bytes")
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.drop = nn.Dropout(0.1)
        self.memory = Memory(limit=400)
        self.mix = nn.LSTM(32, 16, batch_first=True)
        self.out = nn.Linear(16, 8)

    def forward(self, x):
        x = self.memory(self.drop(F.relu(self.up(x))))
        return self.out(self.mix(x)[0])


torch.manual_seed(12)
model = Net()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
lengths = [10, 20, 14, 40, 20, 10, 36, 12]
batch_size, skipped = 32, 0
for step, length in enumerate(lengths):
    x = torch.randn(32, length, 8)
    done = 0
    optimizer.zero_grad()
    total = 0.0
    while done < len(x):
        chunk = x[done : done + batch_size]
        try:
            loss = F.mse_loss(model(chunk)[:, :-1], chunk[:, 1:]) * len(chunk) / len(x)
            loss.backward()
        except torch.OutOfMemoryError as error:
            print(f"| WARNING: {error}, batch of {len(chunk)}: halved")
            skipped += 1
            batch_size //= 2
            continue
        total += loss.item()
        done += len(chunk)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} length {length} batch {batch_size} loss {total:.7f}")
print("retries", skipped)
torch.save(model.state_dict(), "model.pt")
