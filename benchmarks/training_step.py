"""Time of a training step of the compressor against forward and backward of the same model without compression.

    python -m benchmarks.training_step --model ~/.cache/lowrank-kv/SmolLM2-135M-Instruct --results results

Three candidates are called in turn: `plain`, forward and backward of the uncompressed model; `dynakv`, forward and backward
of the compressed one, whose U has changed since the last pass, so that its inverse is taken anew; `dynakv, whole step`,
the same with gradient clipping and AdamW. All have the same frozen backbone: the plain model's backward reaches its
input embeddings through it, as the compressed one's reaches the keys and values of its first layer. Beside each, its share
of what a matrix product reaches. Before timing, open gates are checked to give the plain loss.
"""

import argparse
import copy
import os

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from benchmarks import random_models
from benchmarks.harness import count, interleaved_ms, use_device, write_results
from dynakv.objective import RateRecorder, objective
from lowrank_kv.calibration.activation_moments import calibrate
from lowrank_kv.hf.loading import DTYPES, check_length, load_model
from lowrank_kv.utils import cli
from lowrank_kv.utils.flops import matmul_flops
from training.throughput import model_flops


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="hub id or directory")
    parser.add_argument(
        "--made-up", action="store_true", help="random weights of the model's shape, of which only config.json is read"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the backbone [default %(default)s]")
    parser.add_argument("--batch", type=count, default=1, help="sequences [default %(default)s]")
    parser.add_argument("--length", type=count, default=512, help="tokens of a sequence [default %(default)s]")
    parser.add_argument("--repeats", type=count, default=5, help="timed steps of each [default %(default)s]")
    parser.add_argument("--decoder", choices=dynakv.DECODERS, default="exact", help="[default %(default)s]")
    parser.add_argument("--device", default="cpu", help="[default %(default)s]")
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    arguments = parser.parse_args(argv)

    source = os.path.expanduser(arguments.model)
    use_device(arguments.device)
    load = random_models.load_model if arguments.made_up else load_model
    plain = load(source, dtype=arguments.dtype, device=arguments.device).requires_grad_(False)
    check_length(plain, arguments.length, "--length")
    shape = (arguments.batch, arguments.length)
    ids = torch.randint(10, plain.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(plain.device)
    compressed = copy.deepcopy(plain)
    moments = calibrate(compressed, ids, progress=False)
    dynakv.add_compressors(compressed, dynakv.DynaKVConfig(decoder=arguments.decoder))
    dynakv.initialize_from_moments(compressed, moments)
    compressed.train()
    check(plain, compressed, ids)

    embeddings = plain.get_input_embeddings()(ids).detach().requires_grad_(True)
    parameters = [p for layer in dynakv.compressors(compressed).values() for p in layer.parameters()]
    projections = [side.projection.weight for side in dynakv.token_compressors(compressed)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def learn() -> None:
        with RateRecorder(compressed) as recorder:
            loss = loss_of(compressed, ids, input_ids=ids)
        objective(loss, recorder.rates(), 4.0).backward()

    def passes() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_mul_(projections, 1 + 1e-6)
        learn()

    def whole_step() -> None:
        optimizer.zero_grad()
        learn()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    steps = {
        "plain": lambda: loss_of(plain, ids, inputs_embeds=embeddings).backward(),
        "dynakv": passes,
        "dynakv, whole step": whole_step,
    }
    ms = interleaved_ms(steps, repeats=arguments.repeats)
    rate = matmul_flops(ids.device, plain.dtype)
    print(f"matrix product {rate / 1e12:.2f} TFLOP/s")
    rows = [
        {
            "method": name,
            "ms_per_step": ms[name],
            "ratio_to_plain": ms[name] / ms["plain"],
            "flop_fraction": model_flops(model, arguments.length) * ids.numel() / ms[name] * 1e3 / rate,
        }
        for name, model in zip(ms, (plain, compressed, compressed), strict=True)
    ]
    line = "{method:>18}  {ms_per_step:9.0f} ms/step  {ratio_to_plain:.3f}× plain  {flop_fraction:.0%} of the FLOP/s"
    for row in rows:
        print(line.format(**row))
    if arguments.results:
        write_results(arguments.results, "training_step", vars(arguments) | {"matmul_flops": rate}, rows, model=plain)


def loss_of(model: PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:
    """The mean cross-entropy of each token but the first, fp32, without dimensions.

    Args:
        ids: (B, T) int64.
        inputs: what the model reads of them: `input_ids`, or `inputs_embeds`.
    """
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def check(plain: PreTrainedModel, compressed: PreTrainedModel, ids: Tensor) -> None:
    """What is timed must first be right: with open gates the loss is the plain model's.

    Args:
        ids: (B, T) int64.
    """
    opened = copy.deepcopy(compressed)
    dynakv.open_gates(opened)
    with torch.no_grad():
        expected, actual = loss_of(plain, ids, input_ids=ids), loss_of(opened, ids, input_ids=ids)
    torch.testing.assert_close(actual, expected, atol=1e-4 if plain.dtype == torch.float32 else 0.05, rtol=0)


if __name__ == "__main__":
    cli.run(main)
