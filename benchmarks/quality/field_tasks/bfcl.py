"""Tool calls: choosing among functions, from the Berkeley Function Calling Leaderboard, also in long conversations.

`bfcl` offers each case its own two to four functions. In `bfcl_turns`, the system prompt describes the functions of
`GROUP` cases, and earlier turns show further ones with their calls, up to about 4,000 tokens. The cache has read and
compressed these turns before the question is asked.

The answer is started as in the model's chat template for calls, up to the function's name. It is correct if it has
exactly one call, with the right name and arguments that the leaderboard accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hf_diffkv.evaluation.errors import EvaluationError

from . import wheels
from .cases import Case, Source, chat_text, encode, encode_turns, ends_of

TASKS = ("bfcl", "bfcl_turns")
LIMIT = 256
# tokens of earlier turns, cases that share the same turns, and the minimum number of calls in them
LENGTH, GROUP, FEWEST = 4096, 10, 2
FILE = "BFCL_v4_multiple.json"
# the leaderboard's type names that JSON Schema lacks
SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
# differences between strings that the leaderboard ignores
IGNORED = re.compile(r"[ ,./\-_*^]")
# what every function returns in earlier turns, and the model's reply
RESULT, COMMENT = '{"status": "ok"}', "Done."


def cases(source: Source) -> list[Case]:
    """Makes the cases, task by task. Raises `EvaluationError` if the data is missing or the template takes no tools."""
    problems = list(_distinct(_read()))
    asked = problems[: source.samples]
    found = []
    if "bfcl" in source.tasks:
        found += [case_of(source.tokenizer, "bfcl", each, each["function"], []) for each in asked]
    if "bfcl_turns" not in source.tasks:
        return found
    for start in range(0, len(asked), GROUP):
        group = asked[start : start + GROUP]
        # problems asked elsewhere are shown here, starting with the next one
        others = [*problems[start + GROUP :], *problems[:start]]
        functions, turns = conversation(source.tokenizer, group, others, source.length or LENGTH)
        found += [case_of(source.tokenizer, "bfcl_turns", each, functions, turns) for each in group]
    return found


def _read() -> list[dict[str, Any]]:
    """Reads the problems and their answers."""
    answers = wheels.json_lines(f"{wheels.BFCL}/possible_answer/{FILE}")
    accepted = {each["id"]: each["ground_truth"] for each in answers}
    return [{**each, "accepted": accepted[each["id"]]} for each in wheels.json_lines(f"{wheels.BFCL}/{FILE}")]


def _distinct(problems: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Leaves out problems that share a function name with others, which one system prompt cannot describe."""
    known: set[str] = set()
    for problem in problems:
        names = {each["name"] for each in problem["function"]}
        if not names & known:
            known |= names
            yield problem


def case_of(
    tokenizer: Any, task: str, problem: dict[str, Any], functions: list[dict[str, Any]], turns: list[dict[str, Any]]
) -> Case:
    """Makes the case of a problem with these functions to choose from, after earlier turns."""
    tools = [_as_tool(each) for each in functions]
    asked = [*turns, *_question(problem)]
    opened = chat_text(tokenizer, asked, tools=tools)
    call = _solution(problem)[0]
    answered = chat_text(tokenizer, [*asked, call], asked=False, tools=tools)
    begun, name, _ = answered.removeprefix(opened).partition(call["tool_calls"][0]["function"]["name"])
    whole = opened + begun
    if not (answered.startswith(opened) and name and all(each["name"] in whole for each in functions)):
        raise EvaluationError("the model's chat template takes no tools, which bfcl needs; choose a model that does.")
    before = chat_text(tokenizer, turns, asked=False, tools=tools) if turns else ""
    ids, earlier = encode_turns(tokenizer, whole, before)
    reference = {"accepted": problem["accepted"], "begun": begun}
    solution = answered.removeprefix(whole)
    return Case(task, problem["id"], ids, LIMIT, ends_of(tokenizer), reference, earlier, solution)


def conversation(
    tokenizer: Any, group: list[dict[str, Any]], others: list[dict[str, Any]], length: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the functions of a group and of further problems, and turns that solve the further ones.

    Args:
        tokenizer: tokenizer of the model.
        group: problems to be asked.
        others: problems that may be shown, in order.
        length: minimum number of tokens of the functions and turns.
    """
    functions, turns = [each for problem in group for each in problem["function"]], []
    for count, problem in enumerate(others, start=1):
        functions += problem["function"]
        turns += [*_question(problem), *_solution(problem)]
        written = chat_text(tokenizer, turns, asked=False, tools=[_as_tool(each) for each in functions])
        if count >= FEWEST and len(encode(tokenizer, written)) >= length:
            return functions, turns
    raise EvaluationError(f"--length {length} is more than all of bfcl's functions have; lower it.")


def _question(problem: dict[str, Any]) -> list[dict[str, Any]]:
    return problem["question"][0]


def _solution(problem: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the turns that answer a problem: its call, the function's result, and a comment."""
    ((name, accepted),) = problem["accepted"][0].items()
    arguments = {key: _first(values) for key, values in accepted.items() if values[0] != ""}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": name, "content": RESULT},
        {"role": "assistant", "content": COMMENT},
    ]


def _first(values: Sequence[Any]) -> Any:
    """Returns the first accepted value; dictionaries in it have accepted values of their own."""
    value = values[0]
    if isinstance(value, dict):
        return {key: _first(inner) for key, inner in value.items() if inner[0] != ""}
    if isinstance(value, list):
        return [_first([each]) for each in value]
    return value


def _as_tool(function: dict[str, Any]) -> dict[str, Any]:
    """Returns a function's description in the form that chat templates expect."""
    return {"type": "function", "function": _as_schema(function)}


def _as_schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _as_schema(each) for key, each in value.items()}
    if isinstance(found.get("type"), str):
        found["type"] = SCHEMA_TYPES.get(found["type"].lower(), found["type"])
    return found


def calls_in(text: str) -> list[dict[str, Any]]:
    """Returns the calls in an answer: JSON objects with `name` and `arguments`, whatever markers surround them."""
    found, start, decoder = [], text.find("{"), json.JSONDecoder()
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        else:
            inner = value.get("function", value)
            if isinstance(inner, dict) and isinstance(inner.get("arguments"), dict) and "name" in inner:
                found.append(inner)
        start = text.find("{", end)
    return found


def score(case: Case, text: str) -> float:
    """Returns 1 if the answer is a single accepted call, else 0."""
    calls = calls_in(case.reference["begun"] + text)
    if len(calls) != 1:
        return 0.0
    ((name, accepted),) = case.reference["accepted"][0].items()
    return float(calls[0]["name"] == name and _fits(calls[0]["arguments"], accepted))


def _fits(given: dict[str, Any], accepted: dict[str, list[Any]]) -> bool:
    """Returns whether arguments have accepted values; those that also accept "" may be omitted."""
    if given.keys() - accepted.keys():
        return False
    return all(
        any(_equal(given[name], value) for value in values) if name in given else "" in values
        for name, values in accepted.items()
    )


def _equal(given: Any, value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(given, dict) and _fits(given, value)
    if isinstance(value, list):
        return isinstance(given, list) and len(given) == len(value) and all(map(_equal, given, value))
    if isinstance(value, str):
        return isinstance(given, str) and _plain(given) == _plain(value)
    return type(given) in ((bool,) if isinstance(value, bool) else (int, float, type(None))) and given == value


def _plain(text: str) -> str:
    return IGNORED.sub("", text).lower().replace("'", '"')
