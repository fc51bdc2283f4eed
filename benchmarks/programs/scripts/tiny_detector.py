"""A one-stage detector: lists of images and target dictionaries, matching by IoU, per-image losses, hard negatives, NMS in Python."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def iou(a, b):
    lt, rb = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(2)
    area = lambda x: (x[:, 2:] - x[:, :2]).prod(1)
    return inter / (area(a)[:, None] + area(b)[None] - inter)


def nms(boxes, scores, thr=0.5):
    keep, order = [], scores.argsort(descending=True)
    while order.numel() > 0:
        i = order[0]
        keep.append(i.item())
        if order.numel() == 1:
            break
        order = order[1:][iou(boxes[i][None], boxes[order[1:]])[0] <= thr]
    return keep


class Detector(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        self.cls, self.box = nn.Conv2d(8, 2 * classes, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.classes = classes
        nn.init.constant_(self.cls.bias, -2.0)

    def anchors(self, h, w):
        ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        c = torch.stack([xs, ys], -1).reshape(-1, 1, 2) * 4.0 + 2
        s = torch.tensor([4.0, 8.0]).view(1, 2, 1) / 2
        return torch.cat([c - s, c + s], -1).reshape(-1, 4)

    def forward(self, images, targets=None):
        sizes = [tuple(i.shape[-2:]) for i in images]
        H, W = max(s[0] for s in sizes), max(s[1] for s in sizes)
        batch = images[0].new_zeros(len(images), 1, H, W)
        for img, pad in zip(images, batch):
            pad[:, : img.shape[-2], : img.shape[-1]].copy_(img)
        f = self.backbone(batch)
        n = len(images)
        cls = self.cls(f).view(n, 2, self.classes, *f.shape[-2:]).permute(0, 3, 4, 1, 2).reshape(n, -1, self.classes)
        box = self.box(f).view(n, 2, 4, *f.shape[-2:]).permute(0, 3, 4, 1, 2).reshape(n, -1, 4)
        anchors = self.anchors(*f.shape[-2:])
        if self.training:
            losses = {"cls": [], "box": []}
            for c, b, t in zip(cls, box, targets):
                m = iou(anchors, t["boxes"])
                v, idx = m.max(1)
                idx[v < 0.3] = -1
                idx[m.argmax(0)] = torch.arange(len(t["boxes"]))
                fg = torch.where(idx >= 0)[0]
                gt = torch.zeros_like(c)
                gt[fg, t["labels"][idx[fg]]] = 1.0
                raw = F.binary_cross_entropy_with_logits(c, gt, reduction="none").sum(1)
                neg = raw.detach().clone()
                neg[fg] = -1
                hard = neg.topk(3 * max(1, fg.numel()))[1]
                losses["cls"].append((raw[fg].sum() + raw[hard].sum()) / max(1, fg.numel()))
                losses["box"].append(
                    F.smooth_l1_loss(b[fg], (t["boxes"][idx[fg]] - anchors[fg]) / 4, reduction="sum")
                    / max(1, fg.numel())
                )
            return {k: sum(v) / n for k, v in losses.items()}
        out = []
        for c, b, (h, w) in zip(cls, box, sizes):
            s, l = c.sigmoid().max(1)
            boxes = (anchors + b * 4).clamp(min=0, max=max(h, w))
            k = nms(boxes, s)[:3]
            out.append({"boxes": boxes[k], "scores": s[k], "labels": l[k]})
        return out


def sample():
    h, w = int(torch.randint(12, 20, ())), int(torch.randint(12, 20, ()))
    n = int(torch.randint(1, 4, ()))
    xy = torch.rand(n, 2) * torch.tensor([w - 9.0, h - 9.0])
    return torch.rand(1, h, w), {
        "boxes": torch.cat([xy, xy + 4 + torch.rand(n, 2) * 4], 1),
        "labels": torch.randint(3, (n,)),
    }


torch.manual_seed(0)
model = Detector()
# farspan: model = farspan.distribute(model)
params = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=5e-4)
warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=3)
for it in range(5):
    images, targets = zip(*[sample() for _ in range(3)])
    model.train()
    loss_dict = model(list(images), [{k: v for k, v in t.items()} for t in targets])
    losses = sum(loss for loss in loss_dict.values())
    opt.zero_grad()
    losses.backward()
    opt.step()
    warm.step()
    print(it, {k: v.item() for k, v in loss_dict.items()}, losses.item())
model.eval()
with torch.no_grad():
    for o in model(list(images)):
        print([[round(v, 5) for v in b] for b in o["boxes"].tolist()], o["labels"].tolist(), o["scores"].tolist())
