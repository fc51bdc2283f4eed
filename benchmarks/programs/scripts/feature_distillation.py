"""The shape of RepDistiller: a teacher in eval mode, features of both collected by hooks, a regressor between them."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.block2 = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width, 4))

    def forward(self, x):
        return self.head(self.block2(self.block1(x)))


torch.manual_seed(70)
x = torch.rand(64, 1, 8, 8)
y = (x[:, 0, :4].mean((1, 2)) > 0.5).long() + 2 * (x[:, 0, :, :4].mean((1, 2)) > 0.5).long()
teacher, student = ConvNet(12), ConvNet(5)
regressor = nn.Conv2d(10, 24, 1)
# farspan: teacher, student, regressor = farspan.distribute(nn.ModuleList([teacher, student, regressor]))
optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
for epoch in range(2):
    for i in torch.randperm(64).split(16):
        loss = F.cross_entropy(teacher(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("teacher", loss.item())
torch.save(teacher.state_dict(), "teacher.pth")

teacher.eval()
features = {}
teacher.block2.register_forward_hook(lambda m, i, o: features.__setitem__("teacher", o))
student.block2.register_forward_hook(lambda m, i, o: features.__setitem__("student", o))
optimizer = torch.optim.SGD([*student.parameters(), *regressor.parameters()], lr=0.05, momentum=0.9)
T, alpha, beta = 4.0, 0.9, 0.5
for epoch in range(3):
    student.train()
    for i in torch.randperm(64).split(16):
        with torch.no_grad():
            logit_t = teacher(x[i])
        logit_s = student(x[i])
        loss_cls = F.cross_entropy(logit_s, y[i])
        loss_div = F.kl_div(F.log_softmax(logit_s / T, 1), F.softmax(logit_t / T, 1), reduction="batchmean") * T * T
        loss_kd = F.mse_loss(regressor(features["student"]), features["teacher"].detach())
        loss = (1 - alpha) * loss_cls + alpha * loss_div + beta * loss_kd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    student.eval()
    with torch.no_grad():
        agree = (student(x).argmax(1) == teacher(x).argmax(1)).float().mean().item()
    print(
        f"epoch {epoch} cls {loss_cls.item():.6f} div {loss_div.item():.6f} kd {loss_kd.item():.6f} agree {agree:.4f}"
    )
torch.save({"student": student.state_dict(), "regressor": regressor.state_dict()}, "student.pth")
