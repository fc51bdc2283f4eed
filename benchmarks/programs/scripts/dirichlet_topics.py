"""A topic model with Dirichlet and Gamma draws inside (rsample), as in pyro's and ProdLDA's scripts without pyro."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Beta, Dirichlet, Gamma, kl_divergence


class TopicModel(nn.Module):
    def __init__(self, vocab=30, topics=4):
        super().__init__()
        self.fc1 = nn.Linear(vocab, 24)
        self.drop = nn.Dropout(0.2)
        self.alpha = nn.Linear(24, topics)
        self.scale = nn.Linear(24, 2)
        self.beta = nn.Linear(topics, vocab, bias=False)
        self.register_buffer("prior", torch.full((topics,), 0.7))

    def forward(self, counts):
        h = F.softplus(self.fc1(counts))
        q = Dirichlet(F.softplus(self.alpha(self.drop(h))) + 0.1)
        theta = q.rsample()
        shape, rate = (F.softplus(self.scale(h)) + 0.5).unbind(-1)
        length = Gamma(shape, rate).rsample()
        log_words = F.log_softmax(self.beta(theta), dim=-1)
        return log_words, kl_divergence(q, Dirichlet(self.prior.expand_as(q.concentration))), length


torch.manual_seed(90)
topics = torch.distributions.Dirichlet(torch.full((30,), 0.2)).sample((4,))
mix = torch.distributions.Dirichlet(torch.full((4,), 0.5)).sample((64,))
counts = torch.poisson(40 * mix @ topics)
model = TopicModel()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    for i in torch.randperm(64).split(16):
        keep = Beta(8.0, 2.0).sample((len(i), 1))
        batch = counts[i] * keep
        log_words, kl, length = model(batch)
        nll = -(batch * log_words).sum(1)
        loss = (nll + kl + 0.1 * (length - batch.sum(1) / 40) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.6f} kl {kl.mean().item():.6f} keep {keep.mean().item():.6f}")
top = model.beta.weight.detach().topk(3, dim=0).indices.T
print("top words", top.tolist())
torch.save(model.state_dict(), "topics.pt")
