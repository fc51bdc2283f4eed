"""The shape of kekmodel/FixMatch-pytorch: pseudo labels over a threshold, interleaved batches, an average of the model."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn


class ModelEMA:
    def __init__(self, model, decay):
        self.ema = deepcopy(model)
        self.ema.eval()
        self.decay = decay
        self.param_keys = [k for k, _ in self.ema.named_parameters()]
        self.buffer_keys = [k for k, _ in self.ema.named_buffers()]
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            msd, esd = model.state_dict(), self.ema.state_dict()
            for k in self.param_keys:
                model_v = msd[k].detach()
                ema_v = esd[k]
                esd[k].copy_(ema_v * self.decay + (1.0 - self.decay) * model_v)
            for k in self.buffer_keys:
                esd[k].copy_(msd[k])


def interleave(x, size):
    s = list(x.shape)
    return x.reshape([-1, size] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def de_interleave(x, size):
    s = list(x.shape)
    return x.reshape([size, -1] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


torch.manual_seed(5)
centres = torch.randn(3, 1, 8, 8) * 2
targets = torch.randint(0, 3, (72,))
images = centres[targets] + torch.randn(72, 1, 8, 8)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.1),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.1),
    nn.Dropout(0.2),
    nn.Flatten(),
    nn.Linear(128, 3),
)
# farspan: model = farspan.distribute(model)
no_decay = ["bias", "bn"]
grouped = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 5e-4},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.SGD(grouped, lr=0.02, momentum=0.9, nesterov=True)
ema_model = ModelEMA(model, 0.9)
mu, T, threshold, lambda_u = 2, 1.0, 0.6, 1.0
for step in range(10):
    model.train()
    labelled = torch.randint(0, 12, (6,))
    inputs_x, targets_x = images[labelled], targets[labelled]
    inputs_u = images[torch.randint(12, 60, (6 * mu,))]
    inputs_u_w, inputs_u_s = inputs_u.flip(-1).flip(-1), inputs_u + 0.5 * torch.randn_like(inputs_u)
    inputs = interleave(torch.cat((inputs_x, inputs_u_w, inputs_u_s)), 2 * mu + 1)
    logits = de_interleave(model(inputs), 2 * mu + 1)
    logits_x = logits[:6]
    logits_u_w, logits_u_s = logits[6:].chunk(2)
    Lx = F.cross_entropy(logits_x, targets_x, reduction="mean")
    pseudo_label = torch.softmax(logits_u_w.detach() / T, dim=-1)
    max_probs, targets_u = torch.max(pseudo_label, dim=-1)
    mask = max_probs.ge(threshold).float()
    Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).mean()
    loss = Lx + lambda_u * Lu
    loss.backward()
    optimizer.step()
    ema_model.update(model)
    model.zero_grad()
    print(f"step {step} loss {loss.item():.7f} x {Lx.item():.6f} u {Lu.item():.6f} mask {mask.mean().item():.4f}")
with torch.no_grad():
    outputs = ema_model.ema(images[60:])
    confident = outputs[outputs.softmax(1).max(1).values > 0.5]
    print("test", F.cross_entropy(outputs, targets[60:]).item(), "confident", len(confident), confident.sum().item())
torch.save({"state_dict": model.state_dict(), "ema_state_dict": ema_model.ema.state_dict()}, "fixmatch.pth.tar")
