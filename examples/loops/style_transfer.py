"""Neural style transfer: LBFGS trains an image, until a frozen network sees one's content in the other's style."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from parts.log import Log
from parts.pictures import draw_pictures

SIZE, NUM_STEPS = 16, 3
STYLE_WEIGHT, CONTENT_WEIGHT = 1e4, 1.0


class Features(nn.Module):
    """In the place of a network that was trained on photographs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.blocks.append(nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for block in self.blocks:
            x = F.avg_pool2d(F.relu(block(x)), 2)
            found.append(x)
        return found


def gram_matrix(input: Tensor) -> Tensor:
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


def closure() -> Tensor:
    with torch.no_grad():
        input_img.clamp_(0, 1)
    optimizer.zero_grad()
    features = cnn(input_img)
    pairs = zip(features, style_features, strict=True)
    style_score = torch.stack([F.mse_loss(gram_matrix(f), gram_matrix(s)) for f, s in pairs]).sum()
    content_score = F.mse_loss(features[-1], content_features[-1])
    loss = style_score * STYLE_WEIGHT + content_score * CONTENT_WEIGHT
    loss.backward()
    log.show("step", style=style_score.item(), content=content_score.item())
    return loss


torch.manual_seed(0)
(content_img, style_img), _ = (torch.split(images, 1) for images in draw_pictures(2, SIZE, 3))
cnn = Features().eval()
# farspan: cnn = farspan.distribute(cnn)
input_img = content_img.clone()
with torch.no_grad():
    style_features, content_features = cnn(style_img), cnn(content_img)
cnn.requires_grad_(False)
input_img.requires_grad_(True)
optimizer = optim.LBFGS([input_img], max_iter=4)
log = Log()
for _ in range(NUM_STEPS):
    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
log.show("image", mean=input_img.mean().item(), norm=input_img.norm().item())
log.finish(cnn)
