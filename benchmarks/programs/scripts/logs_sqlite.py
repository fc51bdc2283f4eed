"""An experiment tracker as many labs have one: sqlite, csv and json lines, predictions with np.save, a report at the end."""

import csv
import json
import os
import sqlite3

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Writer:
    """The interface of SummaryWriter, as lines of JSON."""

    def __init__(self, log_dir):
        os.makedirs(log_dir, exist_ok=True)
        self.file = open(os.path.join(log_dir, "events.jsonl"), "a")

    def add_scalar(self, tag, value, step):
        self.file.write(json.dumps({"tag": tag, "value": float(value), "step": step}) + "\n")

    def add_histogram(self, tag, values, step):
        counts, edges = np.histogram(values.detach().numpy(), bins=4)
        self.file.write(
            json.dumps({"tag": tag, "counts": counts.tolist(), "edges": edges.tolist(), "step": step}) + "\n"
        )

    def close(self):
        self.file.close()


torch.manual_seed(31)
x = torch.randn(80, 6)
y = (x[:, :2].sum(1, keepdim=True) + 0.1 * torch.randn(80, 1)).tanh()
model = nn.Sequential(nn.Linear(6, 20), nn.ELU(), nn.Dropout(0.1), nn.Linear(20, 20), nn.ELU(), nn.Linear(20, 1))
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)

db = sqlite3.connect("runs.db")
db.execute("CREATE TABLE IF NOT EXISTS metrics (run INTEGER, step INTEGER, name TEXT, value REAL)")
run = (db.execute("SELECT MAX(run) FROM metrics").fetchone()[0] or 0) + 1
writer = Writer(f"runs/exp{run}")
table = open("metrics.csv", "w", newline="")
rows = csv.writer(table)
rows.writerow(["epoch", "train", "test"])
step = 0
for epoch in range(4):
    model.train()
    for i in torch.randperm(60).split(20):
        loss = F.huber_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        writer.add_scalar("train/loss", loss, step)
        db.execute("INSERT INTO metrics VALUES (?, ?, ?, ?)", (run, step, "train", loss.item()))
    model.eval()
    with torch.no_grad():
        prediction = model(x[60:])
        test = F.huber_loss(prediction, y[60:])
    writer.add_scalar("test/loss", test, step)
    for name, p in model.named_parameters():
        writer.add_histogram(name, p, epoch)
    rows.writerow([epoch, loss.item(), test.item()])
    table.flush()
    db.commit()
    np.save(f"prediction_{epoch}.npy", prediction.numpy())
    print(f"epoch {epoch} train {loss.item():.6f} test {test.item():.6f}")
writer.close()
table.close()
best = db.execute("SELECT step, MIN(value) FROM metrics WHERE name = 'train'").fetchone()
print("best step", best, "rows", db.execute("SELECT COUNT(*) FROM metrics").fetchone()[0])
with open("metrics.csv") as f:
    print(f.read().strip())
drift = np.abs(np.load("prediction_3.npy") - np.load("prediction_0.npy")).max()
with open("report.txt", "w") as f:
    f.write(f"run {run}\nfiles {sorted(os.listdir('.'))}\ndrift {drift!r}\n")
db.close()
torch.save(model.state_dict(), "model.pt")
