"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

import click

from ..arguments import as_ratio
from ..config import DiffKVConfig, Precision
from ..config.checks import as_bytes, bytes_in
from ..config.presets import head_size, preset_named, published
from ..heads.lookup import saved_config_of, user_folder, weights_known
from ..heads.weights import model_digest
from ..running.models import WEIGHTS, resolve_model
from .console import one_line

DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
STDIN = "-"
# kinds of pictures, by the end of the file name
PICTURES = ("png", "svg", "pdf")
# maximum number of characters of a model's name in a folder's name
LONGEST_NAME = 80
# default limit of the mean KL to the dense cache, in nats
MAX_KL = 0.01
OPTION_FIELDS = ("alpha_high", "alpha_low", "window", "sinks", "high", "low", "rotate", "center", "max_bytes")
# argument of `DiffKVConfig.for_model` for --ratio
RATIO = "target_ratio"
# fields that a lossless configuration leaves open
LOSSLESS_FIELDS = {"window", "sinks", "max_bytes"}
# fields that a preset chooses
PRESET_FIELDS = {"alpha_high", "alpha_low", "high", "low"}


class Parsed(click.ParamType):
    """Parameter type that parses a text with `parse`, whose `ValueError` is shown to the user."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, context)


def budget_in(text: str) -> int | str:
    """Parses a size as in `bytes_in`, or a share of free memory such as 80%."""
    try:
        return as_bytes("", text)
    except ValueError as error:
        # the option is named by click
        raise ValueError(str(error).removeprefix("=")) from error


def path_in(text: str) -> Path:
    """Parses the path of a file or folder; rejects an empty text, which `Path` takes as the current folder."""
    if not text:
        raise ValueError("the path is empty; give one, or leave the option out.")
    return Path(text)


def picture_in(text: str) -> Path:
    """Parses the path of a picture to write."""
    path = path_in(text)
    if path.suffix[1:].lower() not in PICTURES:
        raise ValueError(f"{text!r} must end in {', '.join(f'.{name}' for name in PICTURES)}.")
    return path


def precision_in(text: str) -> Precision:
    """Parses bits of keys and values, such as K8V4."""
    try:
        # groups are written with a lower-case letter
        return Precision.parse(text.replace("k", "K").replace("v", "V"))
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def preset_in(text: str) -> str:
    preset_named(text)
    return text


def ratio_in(text: str) -> float:
    """Parses a share above 0 and at most 1."""
    try:
        return as_ratio("the ratio", float(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a ratio; give a number above 0 and at most 1, such as 0.23.") from None


def prompt_in(text: str) -> str:
    """Checks that a text can be tokenised; characters that stand for undecodable bytes cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8 text.") from None
    return text


def numbers_in(text: str) -> tuple[float, ...]:
    """Parses comma-separated numbers of at least 0; returns them in ascending order without duplicates."""
    try:
        values = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        values = []
    if not values or not all(0 <= each < float("inf") for each in values):
        raise ValueError(f"{text!r} is not a list of numbers of at least 0, such as 1,2,3")
    return tuple(values)


SIZE_TYPE, BUDGET_TYPE = Parsed("SIZE", bytes_in), Parsed("SIZE", budget_in)
PATH_TYPE, PROMPT_TYPE = Parsed("FOLDER", path_in), Parsed("TEXT", prompt_in)
PICTURE_TYPE = Parsed("FILE", picture_in)
PRECISION_TYPE, NUMBERS_TYPE = Parsed("KxVy", precision_in), Parsed("A,B", numbers_in)


class Between(click.FloatRange):
    """Number within a range; NaN is rejected."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, param, context)
        if number != number:
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, context)
        return number


class AtLeast(click.IntRange):
    """Integer of at least `least`, with plain error messages."""

    name = "N"

    def __init__(self, least: int = 1) -> None:
        super().__init__(min=least)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, context)
        if number < self.min:
            self.fail(f"{number} is too few; give at least {self.min}.", param, context)
        return number

    def _describe_range(self) -> str:
        return f"at least {self.min}"


def chain(*decorators: Callable) -> Callable:
    """Combines several options into one decorator, in the order of the help."""

    def decorate(function: Callable) -> Callable:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def model_option(**attributes: Any) -> Callable:
    """Makes the option `--model`. Its value is unchanged; `resolve_model` turns it into a path or Hub id."""
    return click.option(
        "--model",
        metavar="M",
        callback=known_model,
        help="Hub id, folder, or a short name: smollm2, gemma3-270m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, tiny-lm "
        "(the checkout's).",
        **attributes,
    )


def known_model(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Callback that checks the name of a model. Raises `click.BadParameter` for a misspelt short name."""
    try:
        if value is not None:
            resolve_model(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, param) from error
    return value


dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPE_NAMES),
    metavar="T",
    default="auto",
    help="Model dtype: float32, bfloat16, float16, or auto, as saved.",
)
running_options = chain(
    dtype_option,
    click.option(
        "--weights",
        type=click.Choice(WEIGHTS),
        metavar="W",
        help="4bit or 8bit: quantise the weights with bitsandbytes; 4bit is faster on a CPU with AVX512-BF16.  "
        "[default: as saved]",
    ),
    click.option("--device", metavar="D", help="For example cpu or cuda:0.  [default: cuda if available]"),
)

quiet_option = click.option("--quiet", is_flag=True, help="Results only, no progress.")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print a single JSON object, and nothing else, on stdout."
)

# bytes of a token, by name or number
preset_options = chain(
    click.option(
        "--preset",
        type=Parsed("P", preset_in),
        help="quality, balanced or small, from most to least memory. Measured models get a precision for each head.",
    ),
    click.option(
        "--ratio",
        type=Parsed("X", ratio_in),
        help="Instead: most bytes of a stored token relative to a dense one, such as 0.23.",
    ),
)

# format of stored tokens
format_options = chain(
    preset_options,
    click.option("--high", metavar="KxVy", type=PRECISION_TYPE, help="Bits of keys and values of important tokens."),
    click.option("--low", metavar="KxVy", type=PRECISION_TYPE, help="Bits of keys and values of other tokens."),
    click.option("--window", type=AtLeast(), help="Newest tokens kept uncompressed."),
    click.option("--sinks", type=AtLeast(0), help="First tokens kept uncompressed."),
    click.option("--rotate/--no-rotate", default=None, help="Store keys and values rotated: fewer bits suffice."),
    click.option("--center/--no-center", default=None, help="Subtract the mean key before keys are stored."),
    click.option("--config", metavar="NAME", help="A saved configuration: a folder, or a Hub repository."),
)

# levels of tokens, and their format
compression_options = chain(
    click.option(
        "--alpha-high", metavar="X", type=float, help="Tokens of at least X times the average significance are high."
    ),
    click.option(
        "--alpha-low",
        metavar="X",
        type=float,
        help="Tokens below X times the average significance are pruned; 0 prunes none.",
    ),
    format_options,
)

level_options = chain(
    compression_options,
    click.option("--lossless", is_flag=True, help="Store everything as it is, to check an installation."),
)

max_bytes_option = click.option(
    "--max-bytes", type=BUDGET_TYPE, help="Budget per device, e.g. 20MB, or 80% of free memory."
)

config_options = chain(level_options, max_bytes_option)


# a text as an argument, by --prompt, or by --prompt-file
prompt_options = chain(
    click.argument("text", metavar="[PROMPT]", type=PROMPT_TYPE, required=False),
    click.option("--prompt", type=PROMPT_TYPE, help="Same as PROMPT; - reads it from stdin."),
    click.option("--prompt-file", metavar="FILE", help="UTF-8; one trailing newline is dropped; - is stdin."),
)


def read_prompt(options: SimpleNamespace) -> str | None:
    """Returns the text of `prompt_options`, or None. Raises `click.UsageError` for several texts or unreadable ones."""
    given = [value for value in (options.text, options.prompt, options.prompt_file) if value is not None]
    if len(given) > 1:
        raise click.UsageError("give one of PROMPT, --prompt and --prompt-file.")
    if not given:
        return None
    if given[0] == STDIN:
        return read_file(STDIN)
    return given[0] if options.prompt_file is None else read_file(options.prompt_file)


def read_file(name: str) -> str:
    """Returns the text of a file, or of stdin for `-`, without one trailing newline. Raises `click.UsageError`."""
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
        # Windows editors may write a byte order mark at the beginning and two characters for a newline
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise click.UsageError(f"cannot read {name}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{'stdin' if name == STDIN else name} is not UTF-8 text.") from error


# a configuration, or fields, possibly with a preset, that override the one that suits a model
ConfigChoice = Union[DiffKVConfig, dict[str, Any]]


def choice_of(options: SimpleNamespace) -> ConfigChoice:
    """Returns the configuration or fields given by `config_options`, without reading `options.model`.

    Raises:
        click.UsageError: values contradict each other, or a saved configuration cannot be read.
    """
    fields = {name: getattr(options, name, None) for name in OPTION_FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    names = ("preset", "ratio", "config", "lossless")
    bases = [f"--{name}" for name in names if getattr(options, name, None)]
    if len(bases) > 1:
        raise click.UsageError(f"{bases[-1]} and {bases[0]} cannot be combined; leave one out.")
    if bases == ["--lossless"]:
        _leave_out(set(fields) - LOSSLESS_FIELDS, "--lossless stores everything as it is")
    if bases == ["--preset"]:
        _leave_out(set(fields) & PRESET_FIELDS, f"--preset {options.preset} chooses bits and levels")
    if bases == ["--ratio"]:
        _leave_out(set(fields) & PRESET_FIELDS, f"--ratio {options.ratio:g} chooses bits and levels")
    try:
        if bases == ["--lossless"]:
            return DiffKVConfig.lossless(**fields)
        if bases == ["--config"]:
            saved = DiffKVConfig.from_pretrained(options.config)
            return DiffKVConfig.from_dict({**saved.to_dict(), **fields})
        # raises for contradictory values, including the published thresholds of some models
        DiffKVConfig(**{**(published(resolve_model(options.model)) or {}), **fields})
    except (ValueError, OSError) as error:
        raise click.UsageError(one_line(error)) from error
    if bases == ["--ratio"]:
        return {RATIO: options.ratio, **fields}
    return {"preset": options.preset, **fields} if options.preset else fields


def config_for(choice: ConfigChoice, model: Any) -> DiffKVConfig:
    """Returns the configuration for a loaded model, or for a model's configuration, then without measured heads.

    Raises:
        click.UsageError: values contradict each other, or a file saved with the model cannot be read.
    """
    try:
        return choice if isinstance(choice, DiffKVConfig) else DiffKVConfig.for_model(model, **choice)
    except (ValueError, OSError) as error:
        raise click.UsageError(one_line(error).replace(f"{RATIO}=", "--ratio ")) from error


def config_before(choice: ConfigChoice, model_config: Any) -> DiffKVConfig:
    """Returns the configuration as far as it is known without weights, which determine the possible ratios.

    Raises:
        click.UsageError: raised by `config_for`, or no model with such heads can reach the ratio.
    """
    if isinstance(choice, DiffKVConfig) or RATIO not in choice:
        return config_for(choice, model_config)
    from ..heads.allocation import check_ratio
    from ..planning import without_weights

    shape = without_weights(model_config)
    if weights_known(shape):
        return config_for(choice, shape)
    head_dim, element_bytes = head_size(model_config)
    try:
        check_ratio(choice[RATIO], [(1, head_dim, head_dim)], element_bytes)
    except ValueError as error:
        raise click.UsageError(one_line(error).replace(f"{RATIO}=", "--ratio ")) from error
    return config_for({name: value for name, value in choice.items() if name != RATIO}, model_config)


def fields_of(choice: ConfigChoice) -> dict[str, Any]:
    """Returns the choice as plain values, for `DiffKVCache` in another process."""
    return choice.to_dict() if isinstance(choice, DiffKVConfig) else choice


def note_of_heads(choice: ConfigChoice, model_config: Any, model: Any) -> str:
    """Returns a note on what a configuration chosen without weights may lack, or an empty string.

    Args:
        model: model on the meta device; None if it could not be built.
    """
    if isinstance(choice, DiffKVConfig) or PRESET_FIELDS & set(choice) or saved_config_of(model_config) is not None:
        return ""
    by_name = published(model_config.name_or_path) is not None
    if weights_known(model) or (by_name and not {"preset", RATIO} & set(choice)):
        return ""
    return (
        "These bits are the same for all heads: no configuration was found next to the model, and whether its heads "
        "were measured is known only once its weights are on this machine."
    )


def _leave_out(spoiling: set[str], why: str) -> None:
    if spoiling:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(spoiling))
        raise click.UsageError(f"{why}; leave {names} out.")


def output_of(options: SimpleNamespace, model: Any, kind: str) -> Path:
    """Returns `--output`, or a folder in the user's cache for runs of this kind with the model's weights and dtype."""
    if options.output is not None:
        return options.output
    # the end of a long path is the most specific part
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.model)[-LONGEST_NAME:].strip("-.")
    dtype = str(model.dtype).removeprefix("torch.")
    return user_folder() / "runs" / kind / f"{name}-{dtype}-{model_digest(model)}"
