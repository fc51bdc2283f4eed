"""A text classifier with RAdamScheduleFree: evaluated with averaged weights, saved in eval mode, reloaded and trained on."""

import json

import schedulefree
import torch
from torch import nn

torch.manual_seed(11)
tokens = torch.randint(0, 40, (80, 9))
labels = ((tokens < 12).sum(1) > 2).long()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(16, 2)

    def forward(self, ids):
        return self.out(self.drop(self.encoder(self.embed(ids)).mean(1)))


model = Classifier()
# farspan: model = farspan.distribute(model)
optimizer = schedulefree.RAdamScheduleFree(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()
history = []


def run_epoch():
    model.train()
    optimizer.train()
    losses = []
    for ids, target in zip(tokens[:64].split(16), labels[:64].split(16)):
        optimizer.zero_grad()
        loss = criterion(model(ids), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def evaluate():
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        logits = model(tokens[64:])
    return criterion(logits, labels[64:]).item(), int((logits.argmax(1) == labels[64:]).sum())


for epoch in range(3):
    train_loss = run_epoch()
    val_loss, correct = evaluate()
    history.append({"epoch": epoch, "train": train_loss, "val": val_loss, "correct": correct})
    print(history[-1])
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")

state = torch.load("checkpoint.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
history.append({"epoch": 3, "train": run_epoch()})
print("resumed", history[-1]["train"], evaluate())
json.dump(history, open("history.json", "w"), indent=2)
torch.save(model.state_dict(), "final.pt")
