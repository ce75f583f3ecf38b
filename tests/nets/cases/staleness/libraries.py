"""What libraries keep in Python: adapters of peft, configs and caches of transformers' models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nets.cases.staleness.script import (
    CLASSES,
    FEATURES,
    Batch,
    Script,
    Small,
    case,
    flag,
    nothing_changes,
    number,
)

TOKENS = 16


def _adapted(*names: str, dropout: float = 0.0) -> Any:
    """A small model with adapters of these names, whose values are not those at which they change nothing."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=2, lora_dropout=dropout, target_modules=["first", "second"])
    model: Any = get_peft_model(Small(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.5)
    return model


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@case("scaling of peft's adapters", "number", library="peft")
def lora_scaling() -> Script:
    model = _adapted("default")

    def change(count: int) -> None:
        for module in model.modules():
            if hasattr(module, "scaling"):
                module.scaling["default"] = number(count)

    return Script(model, change, _loss)


@case("set_scale of one of peft's layers", "number", library="peft")
def lora_set_scale() -> Script:
    model = _adapted("default")
    return Script(model, lambda count: model.base_model.model.first.set_scale("default", number(count)), _loss)


@case("disable_adapter_layers of peft", "flag", library="peft", slow=True)
def lora_disabled() -> Script:
    model = _adapted("default")

    def change(count: int) -> None:
        # The last layer keeps its adapter, so that there is something to train.
        model.base_model.model.first.enable_adapters(not flag(count))

    return Script(model, change, _loss)


@case("set_adapter of peft", "string", library="peft", slow=True)
def lora_chosen() -> Script:
    model = _adapted("one", "other")

    def change(count: int) -> None:
        model.set_adapter(("one", "other")[count % 2])
        for p in model.parameters():
            p.grad = None

    return Script(model, change, _loss)


@case("active adapters of peft, all of them trained", "list", library="peft", slow=True)
def lora_active() -> Script:
    model = _adapted("one", "other")

    def train_all() -> None:
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)

    def change(count: int) -> None:
        model.base_model.set_adapter((["one"], ["one", "other"], ["other"])[count % 3])
        train_all()
        for p in model.parameters():
            p.grad = None

    train_all()
    return Script(model, change, _loss)


@case("p of the dropout of peft's adapters", "number", library="peft")
def lora_dropout() -> Script:
    model = _adapted("default", dropout=0.1)
    part = model.base_model.model.first.lora_dropout["default"]
    return Script(model, lambda count: setattr(part, "p", 0.1 + 0.05 * count), _loss)


def _gemma() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    attention: Any = {"attn_implementation": "eager"}
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=TOKENS, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=4, max_position_embeddings=32, initializer_range=0.5,
            final_logit_softcapping=1.0, use_cache=False, **attention,
        )
    )  # fmt: skip


def _tokens(generator: torch.Generator, step: int) -> Batch:
    return (torch.randint(TOKENS, (2, 6), generator=generator),)


def _causal(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


@case("model.config of transformers", "number", slow=True)
def softcapping() -> Script:
    model = _gemma()
    return Script(
        model, lambda count: setattr(model.config, "final_logit_softcapping", number(count)), _causal, draw=_tokens
    )  # fmt: skip


@case("problem_type of model.config of transformers", "string", slow=True)
def problem_type() -> Script:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(  # type: ignore[call-arg]  # of all configurations
            vocab_size=TOKENS, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_labels=CLASSES, problem_type="regression", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip

    def draw(generator: torch.Generator, step: int) -> Batch:
        return torch.randint(TOKENS, (2, 6), generator=generator), torch.rand(2, CLASSES, generator=generator)

    def forward(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=labels).loss
        return loss

    kinds = ("regression", "multi_label_classification")
    return Script(
        model, lambda count: setattr(model.config, "problem_type", kinds[count % 2]), forward, draw=draw
    )  # fmt: skip


@case("loss_function of a model of transformers", "function", slow=True)
def loss_function() -> Script:
    model = _gemma()

    def doubled(logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
        return 2 * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    own = model.loss_function
    return Script(
        model, lambda count: setattr(model, "loss_function", doubled if flag(count) else own), _causal, draw=_tokens
    )  # fmt: skip


@case("router_aux_loss_coef of a mixture of transformers", "number", slow=True)
def router_loss() -> Script:
    from transformers import MixtralConfig, MixtralForCausalLM

    model: Any = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=TOKENS, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, num_local_experts=2, num_experts_per_tok=2,
            output_router_logits=True, router_aux_loss_coef=0.1, use_cache=False,
        )
    )  # fmt: skip
    return Script(
        model, lambda count: setattr(model, "router_aux_loss_coef", 0.1 * number(count)), _causal, draw=_tokens
    )  # fmt: skip


@case("rotary embedding that keeps the longest sequence so far", "other", tells=False, slow=True)
def dynamic_rope() -> Script:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, initializer_range=0.5, use_cache=False,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        )
    )  # fmt: skip

    def draw(generator: torch.Generator, step: int) -> Batch:
        # A longer one makes frequencies that hold until a short one sets them back.
        length = (12, 128, 12, 24, 12, 64, 32, 12, 24, 20, 128, 12)[step - 1]
        return (torch.randint(TOKENS, (2, length), generator=generator),)

    return Script(model, nothing_changes, _causal, draw=draw)


@case("parallel adapters in a dictionary of modules, chosen by a string", "string")
def chosen_head() -> Script:
    class Model(Small):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({name: nn.Linear(FEATURES, CLASSES) for name in ("one", "other")})
            self.active = "one"

        def forward(self, x: Tensor) -> Tensor:
            unused = sum(head(x) for head in self.heads.values())
            outputs: Tensor = self.outputs(x) + self.heads[self.active](x) + 0 * unused
            return outputs

    model = Model()
    return Script(model, lambda count: setattr(model, "active", ("one", "other")[count % 2]), _loss)
