"""Momentum contrast: an encoder, a copy of it that follows slowly, and a queue of keys, all in one module."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from parts.log import Log
from parts.pictures import draw_pictures

SIZE, BATCH_SIZE, EPOCHS, DIM, K, MOMENTUM, TEMPERATURE = 16, 16, 2, 16, 64, 0.99, 0.2


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 16, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(1))


class MoCo(nn.Module):
    queue: Tensor
    queue_ptr: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q = Encoder()
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for param_k in self.encoder_k.parameters():
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(DIM, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * MOMENTUM + param_q.data * (1.0 - MOMENTUM)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % K

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / TEMPERATURE
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


torch.manual_seed(0)
loader = DataLoader(TensorDataset(*draw_pictures(96, SIZE)), batch_size=BATCH_SIZE, shuffle=True)
model = MoCo()
# farspan: model = farspan.distribute(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
log = Log()
for epoch in range(EPOCHS):
    for i, (images, _) in enumerate(loader):
        output, target = model(images.flip(-1), images + 0.05 * torch.randn_like(images))
        loss = criterion(output, target)
        correct = (output.topk(1)[1].view(-1) == target).float().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.show(f"epoch {epoch} [{i}/{len(loader)}]", loss=loss.item(), accuracy=correct.item() / len(images))
    scheduler.step()
log.finish(model)
