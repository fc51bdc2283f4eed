"""The shape of the profiler tutorial: torch.profiler with a schedule around the loop, record_function in the model."""

import torch
import torch.nn as nn
import torch.profiler
from torch.profiler import ProfilerActivity, record_function, schedule


class MyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.linear = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        with record_function("CONV"):
            x = torch.relu(self.conv(x)).mean((2, 3))
        with record_function("LINEAR PASS"):
            return self.head(self.drop(torch.relu(self.linear(x))))


torch.manual_seed(0)
inputs = torch.randn(64, 3, 8, 8)
targets = torch.randint(0, 5, (64,))
model = MyModule()
# farspan: model = farspan.distribute(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
traces = []


def trace_handler(prof):
    averages = prof.key_averages()
    traces.append(prof.step_num)
    print("trace after step", prof.step_num, "has events:", len(averages) > 0)


def train_step(i):
    idx = torch.randint(0, 64, (16,))
    loss = criterion(model(inputs[idx]), targets[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


with torch.profiler.profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
    on_trace_ready=trace_handler,
    record_shapes=True,
    profile_memory=True,
) as prof:
    for i in range(10):
        print(i, f"{train_step(i):.7f}")
        prof.step()
with torch.autograd.profiler.profile() as old:
    print("in the old profiler", train_step(10))
print("traces", traces, "old has events:", len(old.function_events) > 0)
torch.save(model.state_dict(), "model.pt")
