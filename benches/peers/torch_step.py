#!/usr/bin/env python3
"""One training step in PyTorch on the CPU, of the networks and settings of `bench step`.

    pip install -r requirements.txt
    python torch_step.py --model cosmoflow-128 --threads 2            one row, as JSON
    python torch_step.py --compare ../../target/release/bench         both in alternation, and their ratios
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def status_mib(name):
    """A line of /proc/self/status."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1]) / 1024
    return 0.0


def cosmoflow(size):
    """Seven 3^3 convolutions, the fourth strided, with batch norms and average pools, and three dense layers."""
    from torch import nn

    channels = [4, 16, 32, 64, 128, 256, 256, 256]
    pools = size.bit_length() - 3
    layers = []
    for i, (inputs, outputs) in enumerate(zip(channels, channels[1:])):
        layers.append(nn.Conv3d(inputs, outputs, 3, stride=2 if i == 3 else 1, padding=1, bias=False))
        layers += [nn.BatchNorm3d(outputs), nn.LeakyReLU(0.01, inplace=True)]
        if i < pools:
            layers.append(nn.AvgPool3d(3, stride=2, padding=1))
    layers.append(nn.Flatten())
    units = [2048, 2048, 256, 4]
    for i, (inputs, outputs) in enumerate(zip(units, units[1:])):
        layers += [nn.Dropout(0.2), nn.Linear(inputs, outputs)]
        if i < 2:
            layers.append(nn.LeakyReLU(0.01, inplace=True))
    return nn.Sequential(*layers)


def unet3d():
    """Four levels, 32 to 512 channels, transposed convolutions that keep their channels, 3 classes."""
    import torch
    from torch import nn

    def block(inputs, middle, outputs):
        layers = []
        for a, b in [(inputs, middle), (middle, outputs)]:
            layers += [nn.Conv3d(a, b, 3, padding=1, bias=False), nn.BatchNorm3d(b), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([block(1, 32, 64), block(64, 64, 128), block(128, 128, 256), block(256, 256, 512)])
            self.up = nn.ModuleList([nn.ConvTranspose3d(c, c, 2, stride=2) for c in [512, 256, 128]])
            self.dec = nn.ModuleList([block(below + own, own, own) for below, own in [(512, 256), (256, 128), (128, 64)]])
            self.final = nn.Conv3d(64, 3, 1)

        def forward(self, x):
            skips = []
            for level, down in enumerate(self.down):
                x = down(x if level == 0 else nn.functional.max_pool3d(x, 2))
                skips.append(x)
            skips.pop()
            for up, dec in zip(self.up, self.dec):
                x = dec(torch.cat([skips.pop(), up(x)], dim=1))
            return self.final(x)

    return UNet()


def dice_cross_entropy(logits, classes):
    """The mean cross-entropy, and 1 - Dice of each class over the batch, in the mean."""
    import torch

    cross_entropy = torch.nn.functional.cross_entropy(logits, classes)
    p = torch.softmax(logits, dim=1)
    target = torch.nn.functional.one_hot(classes, logits.shape[1]).movedim(-1, 1).to(p.dtype)
    over = (0, 2, 3, 4)
    dice = (2 * (p * target).sum(over) + 1) / (p.sum(over) + target.sum(over) + 1)
    return cross_entropy + (1 - dice).mean()


def one(model_name, batch, threads, steps):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    name, size = model_name.rsplit("-", 1)
    size = int(size)
    start_mib = status_mib("VmRSS:")
    if name == "cosmoflow":
        model = cosmoflow(size)
        y = torch.rand(batch, 4) * 2 - 1
        channels, loss = 4, lambda out, x: torch.nn.functional.mse_loss(out, y)
    else:
        model = unet3d()
        channels, loss = 1, lambda out, x: dice_cross_entropy(out, ((x > 0).long() + (x > 0.5).long()).squeeze(1))
    x = torch.rand(batch, channels, size, size, size) * 2 - 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    seconds = []
    for step in range(2 + steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        value = loss(model(x), x)
        value.backward()
        optimizer.step()
        if step >= 2:
            seconds.append(time.perf_counter() - start)
    return {
        "program": f"torch {torch.__version__}",
        "model": name,
        "size": size,
        "batch": batch,
        "threads": threads,
        "seconds": statistics.median(seconds),
        "peak_mib": status_mib("VmHWM:"),
        "start_mib": start_mib,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def run(command, threads):
    # Both sides' thread pools.
    environment = dict(os.environ, RAYON_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads))
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}")
    return json.loads(done.stdout)


def compare(bench, models, batch, threads, steps, rounds):
    rows = []
    for model in models:
        ours, theirs = [], []
        for _ in range(rounds):
            settings = ["--model", model, "--batch", str(batch), "--steps", str(steps)]
            ours.append(run([bench, "one-step", *settings], threads))
            theirs.append(run([sys.executable, __file__, *settings, "--threads", str(threads)], threads))

        def middle(rows, of):
            return statistics.median(of(row) for row in rows)

        row = {"model": model, "batch": batch, "threads": threads, "peer": theirs[0]["program"]}
        for name, side in [("ours", ours), ("peer", theirs)]:
            row[f"{name}_seconds"] = middle(side, lambda r: r["seconds"])
            row[f"{name}_mib_above_start"] = middle(side, lambda r: r["peak_mib"] - r["start_mib"])
        row["speed"] = row["peer_seconds"] / row["ours_seconds"]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cosmoflow-64,cosmoflow-128,unet3d-32,unet3d-64", help="network and width, or several with --compare")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, after two that are not")
    parser.add_argument("--compare", metavar="BENCH", help="the program `bench`, to run in alternation")
    parser.add_argument("--rounds", type=int, default=3, help="with --compare, how often each side is run")
    parser.add_argument("--json", metavar="FILE", help="with --compare, write the rows here")
    args = parser.parse_args()
    models = args.model.split(",")
    for model in models:
        name, _, size = model.rpartition("-")
        if name not in ("cosmoflow", "unet3d") or not size.isdigit():
            parser.error(f"{model!r} is none of cosmoflow-SIZE and unet3d-SIZE")
    if args.compare is None:
        if len(models) > 1:
            parser.error("one model at a time without --compare")
        print(json.dumps(one(models[0], args.batch, args.threads, args.steps)))
        return
    rows = compare(args.compare, models, args.batch, args.threads, args.steps, args.rounds)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
