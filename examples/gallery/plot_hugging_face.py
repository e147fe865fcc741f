"""
A Hugging Face model
====================

Models of ``transformers`` need no change. A small GPT-2, made from a configuration (nothing is downloaded), learns
Python source by characters: AdamW, and K-FAC in its place. GPT-2's ``Conv1D`` is no layer type of torch, but enters a
matrix product, so that K-FAC treats it as a layer all the same.
"""

import inspect

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers

import layerwise as lw

text = inspect.getsource(torch.nn.functional)[:200_000]
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
config = transformers.GPT2Config(
    vocab_size=len(letters),
    n_positions=32,
    n_embd=48,
    n_layer=2,
    n_head=4,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
    bos_token_id=None,
    eos_token_id=None,
)


def batch(seed, size=16, length=32):
    starts = torch.randint(len(data) - length - 1, (size, 1), generator=torch.Generator().manual_seed(seed))
    window = data[starts + torch.arange(length + 1)]
    return window[:, :-1], window[:, 1:]


def losses(make, steps=80):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    opt, found = make(model), []
    for step in range(steps):
        x, y = batch(step)
        opt.zero_grad()
        loss = F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        found.append(loss.item())
    return opt, found


_, adamw = losses(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01))
opt, kfac = losses(lambda model: lw.optim.KFAC(model, lr=3e-3, weight_decay=0.01, factor_every=5))

# %%
# What K-FAC does with each parameter. Embeddings, norms and biases get AdamW's step.

print("\n".join(str(opt).splitlines()[:12]))

# %%
# Training loss, as a mean over ten steps.


def smooth(values):
    return torch.tensor(values).unfold(0, 10, 1).mean(1)


figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
axes.plot(smooth(adamw), label="torch.optim.AdamW")
axes.plot(smooth(kfac), label="lw.optim.KFAC, the same rate and decay")
axes.set(xlabel="step", ylabel="loss per character", title="GPT-2, 2 × 48, Python source")
axes.legend(frameon=False)
plt.show()

# %%
# :doc:`Models </models>` lists which parameters of which models have a rule.
