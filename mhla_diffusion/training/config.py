"""What a training recipe may say: one dataclass per TOML section, every field with its meaning.

The classes only hold values; `recipe.py` reads TOML into them and checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

VIDEO_KINDS = ("videos", "moving-emoji")  # of data


def setting(default: Any, doc: str) -> Any:
    """A dataclass field with its documentation; a list, dict or class default is made anew for each recipe."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": doc})
    if isinstance(default, type):
        return field(default_factory=default, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


@dataclass
class RunConfig:
    """[run]: how long, how large, where."""

    name: str = setting("", "name of the run; required. Also names the output folder")
    out: str = setting("", "output folder; empty means runs/<name>")
    seed: int = setting(0, "every random choice is a function of (seed, step, sample)")
    steps: int = setting(1000, "optimizer steps in all; the cosine schedule ends here")
    batch_size: int = setting(
        32, "images or videos per optimizer step, over all processes and accumulation steps"
    )
    gradient_accumulation: int = setting(1, "micro-batches per optimizer step")
    mixed_precision: Literal["no", "bf16"] = setting("no", "autocast; weights and optimizer stay float32")
    tf32: bool = setting(True, "allow TF32 in float32 matrix products on CUDA")
    compile: bool = setting(False, "torch.compile the transformer and, when trained, the text encoder")
    compile_scope: Literal["layers", "model"] = setting(
        "layers",
        "layers: one compiled layer serves them all, ready in seconds. model: whole models, some per cent "
        "faster, minutes to compile",
    )
    cuda_graph: bool = setting(
        False,
        "record loss and gradients of a step once for each shape of a batch as a CUDA graph and repeat it: for small "
        "models, whose kernels a host starts too slowly. One process",
    )
    gradient_checkpointing: bool = setting(False, "recompute activations of the transformer in backward")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: CUDA when present, else the CPU")
    log_every: int = setting(50, "steps between two reads of the loss; the only host synchronisation")
    tracker: Literal["auto", "none", "tensorboard"] = setting(
        "auto", "TensorBoard files under <out>/tracker; auto: where it is installed"
    )
    max_minutes: float = setting(
        0.0, "stop cleanly (checkpoint and export) this long after process start; 0: never"
    )
    init_from: str = setting(
        "",
        "folder to take transformer and text encoder weights from: a pipeline folder, or "
        "the <out>/continue folder of an earlier run, whose ema/ then seeds the EMA",
    )
    first_step: int = setting(-1, "number of the first step; -1: the step that init_from stopped at, else 0")


@dataclass
class LoraConfig:
    """[model.lora]: used by train = "lora+mixing"."""

    rank: int = setting(8, "rank of the adapters")
    alpha: float = setting(8.0, "scale numerator: the update is weighted by alpha / rank")
    targets: list[str] = setting(["to_q", "to_k", "to_v", "to_out.0"], "linear layers that get an adapter")


@dataclass
class ConvertConfig:
    """[model.convert]: turn the base pipeline's stock transformer into an MHLA one before training."""

    block_grid: list[int] = setting(
        [4, 4], "blocks per axis of the token grid; for videos [3, 5, 10] and the like"
    )
    layers: list[int] | str | None = setting(
        None,
        'layers that become MHLA: numbers, or a share such as "2/3" (not 0, 3, 6, ...); left out: all of them',
    )
    gate: bool = setting(False, "add an output gate; starts neutral")
    local_conv: int | None = setting(
        None, "size of a depthwise convolution on the values (3); starts at zero"
    )


@dataclass
class ModelConfig:
    """[model]: what is trained and from where."""

    base: str = setting(
        "",
        "pipeline folder with vae, tokenizer and scheduler, and the text_encoder and transformer "
        "that are not built fresh; a DiT needs the vae, and the transformer unless it is built fresh; required",
    )
    transformer: dict | None = setting(
        None, "[model.transformer]: build a fresh transformer with this config"
    )
    text_encoder: dict | None = setting(
        None, "[model.text_encoder]: build a fresh text encoder, Gemma-2 or for Wan UMT5"
    )
    transformer_class: Literal[
        "MHLASanaTransformer2DModel",
        "SanaTransformer2DModel",
        "MHLADiTTransformer2DModel",
        "MHLAWanTransformer3DModel",
    ] = setting(
        "MHLASanaTransformer2DModel",
        "class of a fresh transformer; the stock one serves for comparisons, a DiT draws classes, a Wan makes videos. "
        "DiT or Wan without MHLA: mhla_layers = []",
    )
    convert: ConvertConfig | None = setting(None, "[model.convert]: convert a stock transformer first")
    new_classes: bool = setting(
        False,
        "DiT of the base: learn the classes of the data from new label embeddings, in place of the base's classes",
    )
    train: Literal["all", "attention", "mixing", "lora+mixing", "lora"] = setting(
        "all",
        "all: every parameter of the transformer. attention: everything inside the self-attention modules "
        "(attn1). mixing: only the coefficient matrices. lora+mixing: adapters on [model.lora] targets, and the "
        "coefficient matrices in full; lora is its older name",
    )
    lora: LoraConfig = setting(LoraConfig, "[model.lora]")
    train_text_encoder: bool = setting(False, "train the text encoder too; a fresh one must be trained")
    defaults: dict = setting(
        {},
        "[model.defaults]: values that the exported pipeline draws with when a call does not "
        "say otherwise; only what the pipeline class stores",
    )


@dataclass
class DataConfig:
    """[data]: pictures or videos, and captions."""

    kind: Literal["folder", "emoji", "videos", "moving-emoji"] = setting(
        "folder",
        "folder: own images; emoji: the emoji set. For Wan, videos: own videos (and images); moving-emoji: clips made "
        "of the emoji set",
    )
    path: str = setting("", "the folder of images or videos, or the emoji tar; required")
    size: int = setting(64, "side of the square, or with buckets the square root of the pixel budget")
    sizes: list[list[int]] = setting(
        [],
        "videos: buckets as [frames, height, width]. A video goes into the longest that it fills, and of these into "
        "the nearest shape. moving-emoji: sizes of the clips, such as [[17, 64, 64]]",
    )
    fps: float = setting(0.0, "videos: frames a second, picked from the file's own; 0: all of them")
    buckets: bool = setting(
        False, "folder: resize into aspect-ratio buckets in place of a square centre crop"
    )
    template: str = setting(
        "a picture of {}", "without captions.jsonl: caption of a class folder's images or videos"
    )
    classes: Literal["names", "order"] = setting(
        "names",
        "DiT of the base: names: a class folder has the name or number of a class. order: the folders in alphabetical "
        "order are classes 0, 1, ..., as ImageNet's are; a new DiT, or new_classes, always numbers them so",
    )
    label: Literal["subgroup", "group"] = setting("subgroup", "emoji, DiT: what the classes are")
    flip: bool = setting(False, "see every picture mirrored, too; not where captions say left or right")
    split: str = setting("train", "emoji and moving-emoji: which split")
    clips: int = setting(20000, "moving-emoji: how many clips of each size")
    styles: list[str] = setting(["flat"], "moving-emoji: styles of the sprites")
    backgrounds: int = setting(4, "emoji: coloured backgrounds of each sprite, beside white")
    compositions: int = setting(20000, "emoji: composed scenes of 1 to 4 sprites; 0 for classes")
    tag_captions: bool = setting(True, "emoji: captions made of the keywords, too")
    caption_dropout: float = setting(
        0.1, "share of samples that see the empty caption, or the null class, for guidance"
    )
    max_sequence_length: int = setting(
        0, "caption tokens, in training and in the exported pipeline; 0: the base pipeline's own value"
    )
    cache: str = setting("runs/latents", "folder of encoded data sets; empty: encode anew each run")
    encode_batch: int = setting(64, "images or videos per autoencoder call")
    keep_on: Literal["device", "host"] = setting("device", "where latents and captions stay during training")


@dataclass
class OptimizerConfig:
    """[optimizer]: AdamW."""

    lr: float = setting(1e-4, "learning rate after warm-up")
    mixing_lr: float = setting(
        0.01,
        "learning rate of the coefficient matrices in units of 1/M, the size of their "
        "entries: the rate used is mixing_lr / M. No weight decay",
    )
    text_encoder_lr: float | None = setting(None, "learning rate of the text encoder; left out: lr")
    weight_decay: float = setting(
        0.0, "for matrices and kernels; never norms, biases, embeddings, tables or gates"
    )
    betas: list[float] = setting([0.9, 0.99], "decay of the first and second moment")
    eps: float = setting(1e-8, "added to the root of the second moment")
    warmup: int = setting(100, "steps of linear warm-up, counted from the first step of the run")
    schedule: Literal["constant", "cosine"] = setting(
        "constant", "after the warm-up; cosine falls to lr_min at run.steps"
    )
    lr_min: float = setting(0.0, "cosine: final learning rate as a share of lr")
    max_grad_norm: float = setting(1.0, "clip the gradient's norm; 0: do not clip")


@dataclass
class DistillConfig:
    """[distill]: a warm start after a conversion. Each MHLA layer first learns what the attention it replaced gave."""

    steps: int = setting(
        0,
        "steps before the first one of [run], on the same batches: each MHLA layer alone learns what the attention "
        "that it replaced gives on the original's inputs. Needs a fresh conversion; 0: none",
    )
    lr: float | None = setting(
        None,
        "learning rate; left out: optimizer.lr. It falls to 0 as a cosine, after a warm-up of optimizer.warmup steps, "
        "at most a tenth of all",
    )


@dataclass
class LossConfig:
    """[loss]: what the transformer learns to predict."""

    kind: Literal["auto", "flow", "diffusion"] = setting(
        "auto",
        "flow: flow matching, see [flow]. diffusion: the noise of a DDPM, and the variance where the transformer has "
        "channels for it. auto: flow for SANA and Wan, diffusion for DiT",
    )
    variational_weight: float = setting(
        0.001,
        "diffusion with a learned variance: weight of the variational bound beside the squared error (lambda of "
        "Improved DDPM, arXiv 2102.09672)",
    )


@dataclass
class FlowConfig:
    """[flow]: flow matching, x_t = (1 - sigma) x_0 + sigma noise, target noise - x_0."""

    weighting: Literal["logit_normal", "uniform"] = setting(
        "logit_normal", "density of the time before the shift"
    )
    logit_mean: float = setting(0.0, "logit_normal: mean of the logit")
    logit_std: float = setting(1.0, "logit_normal: standard deviation of the logit")
    shift: float = setting(1.0, "sigma = shift s / (1 + (shift - 1) s); above 1 favours noisy times")


@dataclass
class EMAConfig:
    """[ema]: averaged weights, which samples and exports use."""

    decay: float = setting(0.999, "decay at full length; 0: the average is the weights themselves")
    warmup: float = setting(
        10.0,
        "decay at step n is min(decay, (1 + n) / (warmup + n)), counted from the run's first step, or from 0 with "
        "init_from; 0: no warm-up",
    )


@dataclass
class CheckpointConfig:
    """[checkpoint]: exact resume, and exports."""

    every: int = setting(1000, "steps between checkpoints; 0: only at the end")
    keep: int = setting(2, "newest checkpoints to keep")
    export_every: int = setting(0, "steps between pipeline exports; 0: only at the end")
    export_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of exported weights; coefficient matrices stay float32"
    )
    export_continue: bool = setting(
        False, "also export <out>/continue (raw and EMA weights), for run.init_from"
    )


@dataclass
class SampleConfig:
    """[sample]: a grid of pictures or videos drawn with the EMA weights while training."""

    every: int = setting(0, "steps between grids; 0: none")
    prompts: list[str] = setting([], "one picture or video each; of a DiT: names or numbers of classes")
    seed: int = setting(0, "picture or video i starts from noise seeded (seed, i)")
    steps: int = setting(20, "sampler steps")
    guidance: float = setting(4.5, "guidance scale")


@dataclass
class Recipe:
    """A whole recipe."""

    run: RunConfig = setting(RunConfig, "[run]")
    model: ModelConfig = setting(ModelConfig, "[model]")
    data: DataConfig = setting(DataConfig, "[data]")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "[optimizer]")
    distill: DistillConfig = setting(DistillConfig, "[distill]")
    loss: LossConfig = setting(LossConfig, "[loss]")
    flow: FlowConfig = setting(FlowConfig, "[flow]")
    ema: EMAConfig = setting(EMAConfig, "[ema]")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "[checkpoint]")
    sample: SampleConfig = setting(SampleConfig, "[sample]")
