"""What tests of saved caches read: a prefix, and the tokens behind it."""

import torch


def random_ids(batch: int = 2, length: int = 40, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def read(model, cache, ids: torch.Tensor, count: int) -> None:
    """The last two tokens one by one, so that what compiled code keeps ready is made."""
    for part in (ids[:, : count - 2], ids[:, count - 2 : count - 1], ids[:, count - 1 : count]):
        model(part, past_key_values=cache)


def read_on(model, cache, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(step, past_key_values=cache).logits for step in ids.split(1, dim=1)], dim=1)
