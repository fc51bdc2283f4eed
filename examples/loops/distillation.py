"""Distillation: a small student learns from the softened answers of a frozen teacher and from the labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from parts.log import Log
from parts.pictures import NUM_KINDS, draw_pictures

SIZE, BATCH_SIZE, EPOCHS, TEMPERATURE, SOFT_WEIGHT = 16, 16, 2, 2.0, 0.25


class Classifier(nn.Module):
    """Convolutions of the given widths, with pooling after every second one, and two linear layers."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(zip((1, *widths), widths, strict=False)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if i % 2 else []
        self.features = nn.Sequential(*layers)
        num_features = widths[-1] * (SIZE >> len(widths) // 2) ** 2
        self.classifier = nn.Sequential(nn.Linear(num_features, 32), nn.ReLU(), nn.Linear(32, NUM_KINDS))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for epoch in range(EPOCHS):
        running_loss = 0.0
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        log.show(f"teacher, epoch {epoch}", loss=running_loss / len(train_loader))


def train_by_distillation(teacher: nn.Module, student: nn.Module) -> None:
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    teacher.eval()
    student.train()
    for epoch in range(EPOCHS):
        running_loss = 0.0
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / TEMPERATURE, dim=-1)
            soft_prob = F.log_softmax(student_logits / TEMPERATURE, dim=-1)
            soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size(0) * TEMPERATURE**2
            label_loss = F.cross_entropy(student_logits, labels)
            loss = SOFT_WEIGHT * soft_loss + (1 - SOFT_WEIGHT) * label_loss
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        log.show(f"student, epoch {epoch}", loss=running_loss / len(train_loader))


def test(model: nn.Module) -> float:
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            _, predicted = torch.max(model(inputs).data, 1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    return 100 * correct / total


torch.manual_seed(42)
train_loader = DataLoader(TensorDataset(*draw_pictures(128, SIZE)), batch_size=BATCH_SIZE, shuffle=True)
test_loader = DataLoader(TensorDataset(*draw_pictures(64, SIZE, seed=1)), batch_size=BATCH_SIZE)
teacher = Classifier(16, 16, 16, 16)
student = Classifier(4, 4)
# farspan: teacher, student = farspan.distribute(nn.ModuleList([teacher, student]))
log = Log()
train(teacher)
log.show("teacher", accuracy=test(teacher))
for p in teacher.parameters():
    p.requires_grad = False
train_by_distillation(teacher, student)
log.show("student", accuracy=test(student))
log.finish(teacher, student)
