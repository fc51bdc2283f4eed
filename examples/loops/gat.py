"""A graph attention network: several heads in a list, masked attention; it keeps the weights of its best epoch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parts.graph import draw_graph
from parts.log import Log

EPOCHS, HIDDEN, NUM_HEADS, NUM_CLASSES, ALPHA = 12, 8, 4, 4, 0.2
DROPOUT = 0.0  # the masks of a distributed model are its own: see docs/limits.md


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features: int, out_features: int, concat: bool = True) -> None:
        super().__init__()
        self.out_features, self.concat = out_features, concat
        self.W = nn.Parameter(torch.empty(size=(in_features, out_features)))
        nn.init.xavier_uniform_(self.W.data, gain=1.414)
        self.a = nn.Parameter(torch.empty(size=(2 * out_features, 1)))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        self.leakyrelu = nn.LeakyReLU(ALPHA)

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        wh = torch.mm(h, self.W)
        wh1 = torch.matmul(wh, self.a[: self.out_features, :])
        wh2 = torch.matmul(wh, self.a[self.out_features :, :])
        e = self.leakyrelu(wh1 + wh2.T)
        zero_vec = -9e15 * torch.ones_like(e)
        attention = F.softmax(torch.where(adj > 0, e, zero_vec), dim=1)
        attention = F.dropout(attention, DROPOUT, training=self.training)
        h_prime = torch.matmul(attention, wh)
        return F.elu(h_prime) if self.concat else h_prime


class GAT(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.attentions = [GraphAttentionLayer(num_features, HIDDEN) for _ in range(NUM_HEADS)]
        for i, attention in enumerate(self.attentions):
            self.add_module(f"attention_{i}", attention)
        self.out_att = GraphAttentionLayer(HIDDEN * NUM_HEADS, NUM_CLASSES, concat=False)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.dropout(x, DROPOUT, training=self.training)
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        x = F.dropout(x, DROPOUT, training=self.training)
        return F.log_softmax(F.elu(self.out_att(x, adj)), dim=1)


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    preds = output.max(1)[1].type_as(labels)
    return preds.eq(labels).double().sum() / len(labels)


torch.manual_seed(72)
features, labels, adj = draw_graph(100, 24, NUM_CLASSES)
idx_train, idx_val, idx_test = torch.arange(40), torch.arange(40, 70), torch.arange(70, 100)
model = GAT(features.shape[1])
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

log = Log()
best, best_epoch = float("inf"), 0
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss_train = F.nll_loss(output[idx_train], labels[idx_train])
        acc_train = accuracy(output[idx_train], labels[idx_train])
        loss_train.backward()
        optimizer.step()
        model.eval()
        output = model(features, adj)
        loss_val = F.nll_loss(output[idx_val], labels[idx_val])
        acc_val = accuracy(output[idx_val], labels[idx_val])
        log.show(
            f"epoch {epoch}",
            loss=loss_train.data.item(),
            accuracy=acc_train.data.item(),
            val_loss=loss_val.data.item(),
            val_accuracy=acc_val.data.item(),
        )
        torch.save(model.state_dict(), Path(folder, f"{epoch}.pkl"))
        if loss_val.data.item() < best:
            best, best_epoch = loss_val.data.item(), epoch
    model.load_state_dict(torch.load(Path(folder, f"{best_epoch}.pkl")))
with torch.no_grad():
    output = model(features, adj)
    log.show(f"test of epoch {best_epoch}", loss=F.nll_loss(output[idx_test], labels[idx_test]).item())
log.finish(model)
