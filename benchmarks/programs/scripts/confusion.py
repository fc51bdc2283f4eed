"""An evaluation with a confusion matrix filled from predictions (cm[t, p] += 1), per-class scores, a table in a file."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = ["cat", "dog", "bird", "fish"]
torch.manual_seed(18)
x = torch.randn(120, 2, 16)
y = (x.abs().sum(2)[:, 0] > 12.8).long() + 2 * (x.sum((1, 2)) > 0).long()
train_loader = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=16, shuffle=True)
test_loader = DataLoader(TensorDataset(x[80:], y[80:]), batch_size=10)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 12, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(24)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(24, 4)

    def forward(self, x):
        out, _ = self.gru(x.transpose(1, 2))
        return self.fc(self.drop(self.norm(out.mean(1))))


net = Net()
# farspan: net = farspan.distribute(net)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(3):
    net.train()
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(xb), yb)
        loss.backward()
        optimizer.step()
    net.eval()
    confusion_matrix = torch.zeros(4, 4, dtype=torch.long)
    histogram = torch.zeros(4)
    class_correct, class_total = [0.0] * 4, [0] * 4
    predictions = []
    with torch.no_grad():
        for xb, yb in test_loader:
            outputs = net(xb)
            _, preds = torch.max(outputs, 1)
            for t, p in zip(yb.view(-1), preds.view(-1)):
                confusion_matrix[t.long(), p.long()] += 1
            c = (preds == yb).squeeze()
            for i in range(len(yb)):
                class_correct[yb[i]] += c[i].item()
                class_total[yb[i]] += 1
            histogram += torch.bincount(preds, minlength=4)
            predictions.append(preds)
    print(f"epoch {epoch} loss {loss.item():.7f}")
    print(confusion_matrix)
    print("predicted", histogram.tolist(), [CLASSES[p] for p in torch.cat(predictions)[:5]])
    recall = confusion_matrix.diag() / confusion_matrix.sum(1).clamp(min=1)
    for name, r, hit, total in zip(CLASSES, recall, class_correct, class_total):
        print(f"  recall of {name:5s}: {r:.4f} ({int(hit)}/{total})")
with open("confusion.txt", "w") as f:
    for row in confusion_matrix.tolist():
        f.write(" ".join(map(str, row)) + "\n")
torch.save({"net": net.state_dict(), "confusion": confusion_matrix, "predictions": torch.cat(predictions)}, "result.pt")
