"""Skip-gram with negative sampling: sparse embeddings under SparseAdam, an EmbeddingBag classifier under SGD."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
np.random.seed(0)
VOCAB = 40


class SkipGram(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.u_embeddings = nn.Embedding(VOCAB, dim, sparse=True)
        self.v_embeddings = nn.Embedding(VOCAB, dim, sparse=True)
        nn.init.uniform_(self.u_embeddings.weight.data, -0.5 / dim, 0.5 / dim)
        nn.init.constant_(self.v_embeddings.weight.data, 0)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u, emb_v = self.u_embeddings(pos_u), self.v_embeddings(pos_v)
        score = F.logsigmoid(torch.clamp(torch.sum(emb_u * emb_v, dim=1), max=10, min=-10))
        neg = torch.bmm(self.v_embeddings(neg_v), emb_u.unsqueeze(2)).squeeze(2)
        neg = torch.sum(F.logsigmoid(-torch.clamp(neg, max=10, min=-10)), dim=1)
        return -torch.mean(score + neg)


class TextClassification(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.embedding = nn.EmbeddingBag(VOCAB, dim, sparse=True)
        self.fc = nn.Linear(dim, 3)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


walk = np.cumsum(np.random.randint(-2, 3, 400)) % VOCAB
skip_gram, classifier = SkipGram(), TextClassification()
# farspan: skip_gram, classifier = farspan.distribute(nn.ModuleList([skip_gram, classifier]))
optimizer = torch.optim.SparseAdam(list(skip_gram.parameters()), lr=2e-2)
running = 0.0
for i in range(12):
    centre = np.random.randint(2, 398, 16)
    context = centre + np.random.choice([-2, -1, 1, 2], 16)
    neg = np.random.randint(0, VOCAB, (16, 4))
    optimizer.zero_grad()
    loss = skip_gram(torch.from_numpy(walk[centre]), torch.from_numpy(walk[context]), torch.from_numpy(neg))
    loss.backward()
    if i == 0:
        grad = skip_gram.u_embeddings.weight.grad
        print("sparse", grad.is_sparse, tuple(grad.coalesce().indices().shape))
    optimizer.step()
    running = running * 0.9 + loss.item() * 0.1
    if i % 4 == 3:
        print(f"batch {i} loss {running:.7f}")
classifier.embedding.weight.data.copy_(skip_gram.u_embeddings.weight.data)
optimizer = torch.optim.SGD(classifier.parameters(), lr=2.0)
for epoch in range(6):
    lengths = np.random.randint(2, 6, 10)
    text = torch.randint(0, VOCAB, (int(lengths.sum()),))
    offsets = torch.from_numpy(np.concatenate([[0], lengths[:-1].cumsum()]))
    label = text[offsets] * 3 // VOCAB
    optimizer.zero_grad()
    loss = F.cross_entropy(classifier(text, offsets), label)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([classifier.fc.weight, classifier.fc.bias], 0.1)
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.7f}")
with open("vectors.txt", "w") as f:
    for w, row in enumerate(skip_gram.u_embeddings.weight.data.numpy()):
        f.write(f"{w} " + " ".join(str(v) for v in row) + "\n")
torch.save(classifier.state_dict(), "classifier.pt")
