"""What is recomputed in backward changes no bit of a Python model, dropout on."""
import gc
import weakref

import tessera
import torch
import transformers as hf
from checks import DEVICE, check, config, main, raises
from torch import nn
from torch.nn import functional

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()
STEPS = 3


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=3, n_head=4, use_cache=False))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)


def tokens_of(step):
    return torch.randint(1, 64, (4, 24), generator=torch.Generator().manual_seed(10 * step + rank))


def gpt2_loss(engine, step):
    tokens = tokens_of(step)
    return engine(input_ids=tokens, labels=tokens).loss


def encoder_loss(engine, step):
    x = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    return engine(x).square().mean()


def run(make, loss_of, stage, section):
    """Losses, last gradients, weights; and what the last forward kept."""
    torch.manual_seed(0)
    model = make()
    engine, *_ = tessera.initialize(model=model, config=config(
        stage, activation_checkpointing=section, optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    losses, gradients = [], {}
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)  # dropout
        loss = loss_of(engine, step)
        engine.backward(loss)
        if step == STEPS - 1:
            gradients = {name: engine._engine.full_gradient(name) for name, parameter in model.named_parameters()
                         if parameter.requires_grad}
        engine.step()
        losses.append(loss.item())
    counts = engine._engine.activation_counts() if engine._engine.recomputes else None
    return losses, gradients, engine.state_dict(), counts


POLICIES = [{"policy": "cheap"}, {"policy": "block"}, {"policy": "block", "number_checkpoints": 1},
            *([{"policy": "offload", "nvme_path": "spill"}] if DEVICE == "cpu" else [])]


def compare(make, loss_of, stage):
    losses, gradients, weights, _ = run(make, loss_of, stage, {})
    for section in POLICIES:
        got = run(make, loss_of, stage, section)
        assert got[0] == losses, (section, got[0], losses)
        for name, gradient in gradients.items():
            assert torch.equal(got[1][name], gradient), (section, name)
        for name, weight in weights.items():
            assert torch.equal(got[2][name], weight), (section, name)
        if section["policy"] == "offload":
            assert got[3]["num_offloaded"] > 0 and got[3]["num_repeated"] == 0, (section, got[3])
        else:
            assert got[3]["num_dropped"] > 0 and got[3]["num_repeated"] > 0, (section, got[3])


@check
def gpt2_of_transformers():
    for stage in (0, 3):
        compare(gpt2, gpt2_loss, stage)


@check
def encoder_of_torch():
    for stage in (0, 3):
        compare(Encoder, encoder_loss, stage)


@check
def chunked_loss_without_an_engine():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    target = torch.tensor([1, 19, -100, 0, 5, 7])
    functional.cross_entropy(hidden @ weight.T, target).backward()
    wanted = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    tessera.chunked_cross_entropy(hidden, weight, target, chunk_rows=4).backward()
    torch.testing.assert_close((hidden.grad, weight.grad), wanted, rtol=0, atol=1e-6)
    for without_gradients in (torch.no_grad(), torch.inference_mode()):
        with without_gradients:
            value = tessera.chunked_cross_entropy(hidden, weight, target, chunk_rows=4)
            torch.testing.assert_close(value, torch.nn.functional.cross_entropy(hidden @ weight.T, target))
    raises(tessera.Error, lambda: tessera.chunked_cross_entropy(hidden, weight, target, bias=torch.zeros(1)), "bias [1]")
    raises(tessera.Error, lambda: tessera.chunked_cross_entropy(hidden, weight, target.int()), "target Int")
    raises(tessera.Error, lambda: tessera.chunked_cross_entropy(hidden, weight, target[:3]), "target [3]; expected (…, dim)")
    raises(tessera.Error, lambda: tessera.chunked_cross_entropy(hidden, weight, target, chunk_rows=0), "chunk_rows is 0")


@check
def nothing_is_left_behind():
    """An engine that recomputes is collected like any other, and so is what its graph held."""
    engine, *_ = tessera.initialize(model=gpt2(), config=config(0, activation_checkpointing={"policy": "block"}))
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: seen.append(weakref.ref(output)) if isinstance(output, torch.Tensor) else None)
    engine.backward(gpt2_loss(engine, 0))
    handle.remove()
    engine.step()
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert seen and not any(tensor() is not None for tensor in seen)
    assert gone() is None


if __name__ == "__main__":
    main()
