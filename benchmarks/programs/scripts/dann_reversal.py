"""Domain adaptation: a gradient reversal function with a scheduled alpha, two heads, iterators zipped, MMD with cdist and median bandwidth."""

import numpy as np
import torch
import torch.nn as nn
from torch.autograd import Function


class ReverseLayerF(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.alpha, None


class CNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature = nn.Sequential()
        self.feature.add_module("f_conv1", nn.Conv2d(1, 6, kernel_size=3))
        self.feature.add_module("f_bn1", nn.BatchNorm2d(6))
        self.feature.add_module("f_pool1", nn.MaxPool2d(2))
        self.feature.add_module("f_relu1", nn.ReLU(True))
        self.class_classifier = nn.Sequential(
            nn.Linear(6 * 9, 10),
            nn.BatchNorm1d(10),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(10, 3),
            nn.LogSoftmax(dim=1),
        )
        self.domain_classifier = nn.Sequential(
            nn.Linear(6 * 9, 8), nn.ReLU(True), nn.Linear(8, 2), nn.LogSoftmax(dim=1)
        )

    def forward(self, x, alpha):
        x = x.expand(x.data.shape[0], 1, 8, 8)
        feature = self.feature(x).view(-1, 6 * 9)
        return self.class_classifier(feature), self.domain_classifier(ReverseLayerF.apply(feature, alpha)), feature


def mmd(a, b):
    z = torch.cat([a, b])
    d = torch.cdist(z, z).pow(2)
    s = d.detach()[d.detach() > 0].median()
    k = sum(torch.exp(-d / (s * m)) for m in (0.5, 1.0, 2.0))
    n = len(a)
    return k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()


torch.manual_seed(0)
net = CNNModel()
# farspan: net = farspan.distribute(net)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
loss_class, loss_domain = nn.NLLLoss(), nn.NLLLoss()
for p in net.parameters():
    p.requires_grad = True
src = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.rand(24, 1, 8, 8), torch.arange(24) % 3), batch_size=6, shuffle=True
)
tgt = torch.utils.data.DataLoader(torch.rand(18, 1, 8, 8) + 0.5, batch_size=6, shuffle=True)
for epoch in range(2):
    n = min(len(src), len(tgt))
    src_iter, tgt_iter = iter(src), iter(tgt)
    for i in range(n):
        p = float(i + epoch * n) / 2 / n
        alpha = 2.0 / (1.0 + np.exp(-10 * p)) - 1
        s_img, s_label = next(src_iter)
        net.zero_grad()
        class_out, dom_out, f_s = net(s_img, alpha=alpha)
        err_s_label = loss_class(class_out, s_label)
        err_s_dom = loss_domain(dom_out, torch.zeros(len(s_img)).long())
        _, dom_out, f_t = net(next(tgt_iter), alpha=alpha)
        err_t_dom = loss_domain(dom_out, torch.ones(6).long())
        dist = mmd(f_s, f_t)
        (err_t_dom + err_s_dom + err_s_label + 0.1 * dist).backward()
        optimizer.step()
        print(
            "epoch: %d, [iter: %d / all %d], err_s_label: %f, err_s_domain: %f, err_t_domain: %f %f"
            % (epoch, i, n, err_s_label.cpu().data.numpy(), err_s_dom.cpu().data.numpy(), err_t_dom.cpu().item(), dist)
        )
    torch.save(net, "model_epoch_{0}.pth".format(epoch))
my_net = torch.load("model_epoch_1.pth", weights_only=False).eval()
pred = my_net(s_img, alpha=0)[0].data.max(1, keepdim=True)[1]
print(pred.eq(s_label.data.view_as(pred)).cpu().sum().item())
