"""`hf-diffkv calibrate` for heads: measures them and chooses the precisions of lowest loss at a ratio."""

from __future__ import annotations

import math
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..config.presets import DEFAULT_PRESET, PRESETS, RATIOS
from ..evaluation.errors import EvaluationError
from ..heads.hub import CONFIG_NAME, QUERIES_NAME
from ..heads.lookup import FOLDER_VARIABLE, user_folder
from ..precision import Precision
from .console import Interrupted, paragraph, progress, table
from .options import output_of

# precision whose size is suggested next for a model that caches latents
SMALLER_LATENTS = "K8V5"


def calibrate_heads(options: SimpleNamespace) -> None:
    """Runs the command for heads.

    Raises:
        EvaluationError: the user can correct the error; measurements are kept.
        Interrupted: the user stopped the command; measurements are kept.
    """
    from ..calibration.documents import DOCUMENT_LENGTH, documents_for
    from ..calibration.heads import config_for, measure
    from ..calibration.queries import keep_queries
    from ..calibration.texts import read_pieces
    from ..config.latent import LATENT_PRESETS, latent_dims, latent_ratio
    from ..config.presets import head_size
    from ..evaluation.environment import describe_environment
    from ..heads.allocation import DEEP_LADDER, LATENT_LADDER, check_ratio
    from ..heads.lookup import keep
    from ..running.models import load_config, load_model

    model_config, tokenizer = load_config(options.model)
    head_dim, element_bytes = head_size(model_config)
    dims = latent_dims(model_config)
    if dims is None:
        default, plain, ladder = RATIOS[DEFAULT_PRESET], PRESETS[DEFAULT_PRESET]["high"], DEEP_LADDER
    else:
        plain, ladder = Precision.parse(LATENT_PRESETS["small"]), LATENT_LADDER
        default = _rounded_up(latent_ratio(plain.name, model_config))
    ratio = default if options.ratio is None else options.ratio
    try:
        check_ratio(ratio, [(1, *(dims or (head_dim, head_dim)))], element_bytes, ladder)
    except ValueError as error:
        raise EvaluationError(str(error).replace("target_ratio=", "--ratio ")) from error
    _check_user_folder()
    length = options.length or DOCUMENT_LENGTH
    pieces = None if options.text is None else read_pieces(options.text)
    documents = documents_for(tokenizer, pieces, length)
    progress(f"loading {options.model}", options.quiet)
    model = load_model(options.model, options.dtype, options.device, options.quiet, options.weights)
    output = output_of(options, model, "heads")
    try:
        measured = measure(model, documents, output, options.quiet)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted. Measurements so far are kept in {output}: run the same command to continue."
        ) from error
    source = {"model": options.model, "dtype": str(model.dtype).removeprefix("torch."), "length": length}
    source |= {"text": options.text} if options.text else {}
    config = config_for(measured.sensitivity, ratio, **source, versions=describe_environment(model.device))
    config.save_pretrained(output)
    measured.queries.save(output / QUERIES_NAME)
    keep_queries(measured.queries)
    found = dims is None and ratio == default
    use = "DiffKVCache(model)" if found else f"DiffKVCache(model, target_ratio={ratio:g})"
    print(_report(options, config.calibration, plain, use, output, keep(measured.sensitivity)))


def _check_user_folder() -> None:
    """Raises `EvaluationError` if measurements, which take minutes, could not be kept for the model's caches."""
    folder = user_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EvaluationError(
            f"measured heads are kept in {folder}, which cannot be written ({error.strerror}); set {FOLDER_VARIABLE} "
            "to another folder."
        ) from error


def _report(
    options: SimpleNamespace, calibration: dict[str, Any], other: Precision, use: str, output: Path, kept: Path
) -> str:
    """Describes the result, compared with an uncalibrated model's precision, and the next steps."""
    from ..heads.allocation import SENSITIVITY, one_for_all, ratio_of

    plain = one_for_all(other, calibration)
    rows = [
        ("each head its own bits", f"{calibration['ratio']:.1%}", f"{calibration['predicted_kl']:.4f}"),
        (f"not calibrated: {plain.precision} for all", f"{plain.ratio:.1%}", f"{plain.one_for_all:.4f}"),
    ]
    latent = calibration[SENSITIVITY].get("latent")
    smaller = _rounded_up(ratio_of(SMALLER_LATENTS, calibration)) if latent else RATIOS["small"]
    again = shlex.join(["hf-diffkv", "calibrate", *_given(options), "--ratio", f"{smaller:g}"])
    return "\n".join(
        [
            table(("", "of a dense cache's bytes", "predicted KL"), rows),
            "",
            paragraph(
                f"Bytes are those of stored tokens; the window is extra. {use} finds this automatically, in {kept}. "
                f"The configuration is {output / CONFIG_NAME}; {QUERIES_NAME} next to it has the moments of queries."
            ),
            "",
            "Next, check it on your own text, or choose another size (nothing is remeasured):",
            f"  {shlex.join(['hf-diffkv', 'verify', '--model', options.model])}",
            f"  {again}",
        ]
    )


def _rounded_up(ratio: float) -> float:
    return math.ceil(1000 * ratio) / 1000


def _given(options: SimpleNamespace) -> list[str]:
    """Returns the arguments that reuse the same measurements."""
    values = {
        name: getattr(options, name) for name in ("model", "output", "text", "length", "dtype", "weights", "device")
    }
    given = {name: value for name, value in values.items() if value is not None and (name, value) != ("dtype", "auto")}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]
