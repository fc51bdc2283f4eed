"""A graph convolutional network with a sparse adjacency matrix, own layers and dropout between them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parts.graph import draw_graph
from parts.log import Log

EPOCHS, HIDDEN, NUM_CLASSES, DROPOUT = 20, 16, 4, 0.5


class GraphConvolution(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        stdv = 1.0 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-stdv, stdv)
        self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input: Tensor, adj: Tensor) -> Tensor:
        support = torch.mm(input, self.weight)
        return torch.spmm(adj, support) + self.bias


class GCN(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gc1 = GraphConvolution(num_features, HIDDEN)
        self.gc2 = GraphConvolution(HIDDEN, HIDDEN)
        self.gc3 = GraphConvolution(HIDDEN, NUM_CLASSES)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, DROPOUT, training=self.training)
        x = F.relu(self.gc2(x, adj))
        x = F.dropout(x, DROPOUT, training=self.training)
        return F.log_softmax(self.gc3(x, adj), dim=1)


def accuracy(output: Tensor, labels: Tensor) -> float:
    preds = output.max(1)[1].type_as(labels)
    return preds.eq(labels).double().sum().item() / len(labels)


torch.manual_seed(42)
features, labels, edges = draw_graph(120, 24, NUM_CLASSES)
degree = edges.sum(1).pow(-0.5)
adj = (degree.unsqueeze(1) * edges * degree).to_sparse()
idx_train, idx_val, idx_test = torch.arange(40), torch.arange(40, 70), torch.arange(70, 120)
model = GCN(features.shape[1])
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

log = Log()
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
        f"epoch {epoch}", loss=loss_train.item(), accuracy=acc_train, val_loss=loss_val.item(), val_accuracy=acc_val
    )
model.eval()
output = model(features, adj)
log.show("test", loss=F.nll_loss(output[idx_test], labels[idx_test]).item())
log.finish(model)
