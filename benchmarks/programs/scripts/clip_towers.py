"""Two towers and a learned temperature outside of them, trained by a contrastive loss in phases; retrieval in
inference mode between the epochs, a new optimizer and the saved state of the old one for each phase."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)
NUM_WORDS, LENGTH, WIDTH, BATCH = 40, 6, 32, 16


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.position = nn.Parameter(torch.randn(4, WIDTH) * 0.02)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.project = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return F.normalize(self.project(self.layer(tokens).mean(1)), dim=-1)


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, WIDTH, padding_idx=0)
        self.recur = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.project = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, words):
        states, _ = self.recur(self.embed(words))
        last = (words != 0).sum(1) - 1
        return F.normalize(self.project(states[torch.arange(len(words)), last]), dim=-1)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = ImageTower(), TextTower()

    def forward(self, images, words):
        return {"image": self.image(images), "text": self.text(words)}


def pairs(number):
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(1, NUM_WORDS, (BATCH, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (BATCH, 1), generator=generator)
    words[torch.arange(LENGTH) >= lengths] = 0
    colours = torch.linspace(-1, 1, NUM_WORDS)[words].mean(1)[:, None, None, None]
    return colours + 0.3 * torch.randn(BATCH, 3, 8, 8, generator=generator), words


@torch.inference_mode()
def retrieval(model):
    model.eval()
    images, words = pairs(1000)
    out = model(images, words)
    ranks = (out["image"] @ out["text"].T).argsort(1, descending=True)
    place = (ranks == torch.arange(BATCH)[:, None]).int().argmax(1)
    model.train()
    return (place < 5).float().mean().item(), out["image"].std().item()


model = Towers()
# farspan: model = farspan.distribute(model)
log_scale = nn.Parameter(torch.tensor(2.0))

PHASES = [
    ("warm", lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)),
    ("main", lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)),
    ("cool", lambda groups: torch.optim.NAdam(groups, lr=1e-3)),
]
saved = {}
number = 0
for name, make in PHASES:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = make([{"params": decayed}, {"params": [*others, log_scale], "weight_decay": 0.0}])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=6)
    for _ in range(6):
        optimizer.zero_grad()
        images, words = pairs(number)
        out = model(images, words)
        logits = log_scale.exp() * out["image"] @ out["text"].T
        wanted = torch.arange(BATCH)
        loss = (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*model.parameters(), log_scale], 1.0)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            log_scale.clamp_(0.0, 4.6)
            model.text.embed.weight.renorm_(2, 0, 6.0)
        number += 1
        print(f"{name} {number:2d} loss {loss.item():.9f} norm {norm.item():.9f} scale {log_scale.item():.9f}")
    print("retrieval %.4f, spread %.9f" % retrieval(model))
    saved[name] = optimizer.state_dict()
torch.save({"phases": saved, "model": model.state_dict(), "log_scale": log_scale.detach()}, "towers.pt")
