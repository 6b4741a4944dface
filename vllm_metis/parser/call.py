# SPDX-License-Identifier: Apache-2.0
"""How the text between two markers is read as a tool call.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

A value is raw text and may hold anything, this format included, so a tag inside it ends it only
where the template would have written that tag: `</parameter>` on a line of its own, with another
`<parameter=` or `</function>` after it. A value that was opened on the tag's own line may be closed
on its own line too. Where a tag in a value leaves two readings (a quoted call, or a closing tag that
the model forgot), the rest is held back until the call's text is complete, and then the reading wins
in which the call is well formed.
"""

import enum
import re
from collections.abc import Callable

from vllm_metis.parser.arguments import Parameters, quote
from vllm_metis.parser.tag_beginnings import beginning_finder

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

# A tag ends at its ">"; where that is missing, at the end of its line or the next tag.
_FUNCTION_TAG = re.compile(rf"\s*{FUNCTION}([^<>\n]*)(>|(?=[<\n]))")
_PARAMETER_TAG = re.compile(rf"{PARAMETER}([^<>\n]*)(>|(?=[<\n]))")
_LONGEST_NAME = 256

_TAGS_IN_VALUE = ("\n" + PARAMETER_END, PARAMETER_END, "\n" + PARAMETER, "\n" + FUNCTION_END)
_TAG_IN_VALUE = re.compile("|".join(_TAGS_IN_VALUE))
_beginning_of_tag_in_value = beginning_finder(_TAGS_IN_VALUE)

# What follows `</parameter>`: another tag, or nothing that could not become one.
_BEGUN = "|".join(tag[:n] for tag in (PARAMETER, FUNCTION_END) for n in range(len(tag) - 1, 0, -1))
_NEXT_TAG = re.compile(rf"\s*(?:(?P<tag>{PARAMETER}|{FUNCTION_END})|(?:{_BEGUN})?\Z)")

# What settles a value with two readings.
_QUOTED_TAG = re.compile(rf"\n(?:(?P<opens>{PARAMETER}[^<>\n]+>)(?=\n)|{PARAMETER_END})")
_NEXT_PARAMETER = re.compile(
    rf"(?:(?P<closed>\n?{PARAMETER_END})\s*|\n)(?P<tag>{PARAMETER}(?P<name>[^<>\n]+)>)"
)
_OVER = re.compile(rf"\n{PARAMETER_END}\s*{FUNCTION_END}\s*\Z")
_CALL_END = re.compile(rf"(?:\n?{PARAMETER_END}\s*|\n)(?P<tag>{FUNCTION_END})")


class Status(enum.Enum):
    UNNAMED = enum.auto()  # no complete `<function=NAME>` yet
    OPEN = enum.auto()
    CLOSED = enum.auto()  # `</function>` came
    REFUSED = enum.auto()  # this is no call


class Call:
    """Reads the text of one call piece by piece into its name and the JSON of its arguments.

    `feed` and `close` return the next fragment of that JSON; `status`, `name` and `rest` are what
    they left. `rest` is text that does not belong to the call.

    Args:
        parameters_of: gives what the tool of a name declares.
    """

    def __init__(self, parameters_of: Callable[[str], Parameters]) -> None:
        self.status = Status.UNNAMED
        self.name = ""
        self.rest = ""
        self._parameters_of = parameters_of
        self._step: Callable[[], bool] = self._read_function_tag
        self._text = ""  # received and not yet understood
        self._incoming: list[str] = []  # received after it
        self._awaits_tag = False  # nothing but a tag would tell what the text is
        self._whole = False  # no more text is coming
        self._complete = False  # ... because the model was done, not because it was cut
        self._fragments: list[str] = []
        self._given: set[str] = set()

    @property
    def in_value(self) -> bool:
        return self.status is Status.OPEN and self._step != self._read_parameter_tag

    @property
    def may_be_over(self) -> bool:
        """Whether what was fed ends like a call; a value that is held back may hold that end."""
        return _OVER.search(self.unread) is not None

    @property
    def unread(self) -> str:
        return self._text + "".join(self._incoming)

    def feed(self, text: str) -> str:
        self._incoming.append(text)
        if self._step == self._hold or (self._awaits_tag and text.isspace()):
            return ""
        return self._run()

    def close(self, complete: bool) -> str:
        """Read what is held back and close the JSON.

        Args:
            complete: whether the model was done. If not, the output was cut, and an unfinished
                value comes back as the text that was written of it.
        """
        self._whole, self._complete = True, complete
        fragment = self._run()
        if self.status is Status.OPEN:
            fragment += self._end_of_arguments()
        return fragment

    def _run(self) -> str:
        self._text = self.unread
        self._incoming.clear()
        self._awaits_tag = False
        while self.status in (Status.UNNAMED, Status.OPEN) and self._step():
            pass
        fragment = "".join(self._fragments)
        self._fragments.clear()
        return fragment

    # A step reads from the front of the text; it returns False when it needs more of it.

    def _read_function_tag(self) -> bool:
        tag = _FUNCTION_TAG.match(self._text)
        if tag and (name := tag[1].strip()):
            self.name, self.status = name, Status.OPEN
            self._parameters = self._parameters_of(name)
            self._text = self._text[tag.end() :]
            self._step = self._read_parameter_tag
            return True
        start = self._text.lstrip()
        self._awaits_tag = not start
        if tag or len(start) > _LONGEST_NAME or not FUNCTION.startswith(start[: len(FUNCTION)]):
            self.status, self.rest = Status.REFUSED, self._text
        return False

    def _read_parameter_tag(self) -> bool:
        text = self._text = self._text.lstrip()
        if text.startswith(FUNCTION_END):
            self._fragments.append(self._end_of_arguments())
            self.status, self.rest = Status.CLOSED, text[len(FUNCTION_END) :]
            return False
        if tag := _PARAMETER_TAG.match(text):
            return self._open_value(tag)
        if any(tag.startswith(text[: len(tag)]) for tag in (PARAMETER, FUNCTION_END)):
            return False
        # Anything else has no place in a call: go on at the next tag.
        places = [at for tag in (PARAMETER, FUNCTION_END) if (at := text.find(tag)) > 0]
        self._text = text[min(places) :] if places else text[0] + text[1:][-len(PARAMETER) :]
        return bool(places)

    def _open_value(self, tag: re.Match[str]) -> bool:
        key, next_character = tag[1].strip(), self._text[tag.end() : tag.end() + 1]
        if not next_character and not self._whole:
            return False
        self._text = self._text[tag.end() :]
        if key and (tag[2] or (next_character == "\n" and not re.search(r"\s", key))):
            self._key, self._admitted = key, self._parameters.admitted(key)
            self._own_lines = next_character == "\n"
            self._at_template_newline = self._own_lines
            self._value: list[str] = []
            self._streaming = False
            self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        text, position = self._text, 0
        while tag := _TAG_IN_VALUE.search(text, position):
            awaits_tag = not text[tag.end() :].strip()
            if tag[0].endswith(PARAMETER_END):
                follows = _NEXT_TAG.match(text, tag.end())
                if not follows:
                    position = tag.end()
                    continue
                if not follows["tag"]:
                    self._awaits_tag = awaits_tag
                    return self._pause(tag.start(), len(text), finished=True)
                if tag[0].startswith("\n") or not self._own_lines:
                    self._end_value(tag.start(), tag.end())
                    return True
            elif tag[0].endswith(FUNCTION_END) and awaits_tag:
                # Either the value lacks its own closing tag, or it goes on.
                self._awaits_tag = True
                return self._pause(tag.start(), tag.start(), finished=True)
            self._pass_on(text[: tag.start()])
            self._text = text[tag.start() :]
            self._step = self._hold
            return True
        return self._pause(self._end_of_text(), len(text), finished=self._complete)

    def _pause(self, end: int, next_tag: int, finished: bool) -> bool:
        """Pass the value on up to `end`; if no more text is coming, the value ends there."""
        if self._whole:
            self._end_value(end, next_tag, finished)
            return True
        self._pass_on(self._text[:end])
        self._text = self._text[end:]
        return False

    def _end_of_text(self) -> int:
        """Return where the text ends without what may be the beginning of a tag."""
        text = self._text
        if self._whole and self._complete:
            return len(text.removesuffix("\n"))
        return len(text) - _beginning_of_tag_in_value(text)

    def _hold(self) -> bool:
        if self._whole:
            self._end_value(*self._settle())
        return self._whole

    def _settle(self) -> tuple[int, int, bool]:
        """Return where the open value ends, where the text goes on, and whether the value is whole."""
        text, depth = self._text, 0
        for tag in _QUOTED_TAG.finditer(text):
            if tag["opens"]:
                depth += 1
            elif depth:
                depth -= 1
            elif _NEXT_TAG.match(text, tag.end()):
                # What the value quotes is closed, so this closes the value.
                return tag.start(), tag.end(), True
        ends = list(_CALL_END.finditer(text))
        if not self._complete and (not ends or text[ends[-1].end() :].strip()):
            # Cut, maybe in the middle of a quotation.
            return self._end_of_text(), len(text), False
        # One is not closed: a parameter that the call lacks otherwise is taken for the next.
        for tag in _NEXT_PARAMETER.finditer(text):
            name, closed = tag["name"], (tag["closed"] or "").startswith("\n")
            if name not in {self._key, *self._given} and (
                closed or (name in self._parameters and not _opens(name, text[tag.end() :]))
            ):
                return tag.start(), tag.start("tag"), True
        if ends:
            return ends[-1].start(), ends[-1].start("tag"), True
        return self._end_of_text(), len(text), True

    def _end_value(self, end: int, next_tag: int, finished: bool = True) -> None:
        self._pass_on(self._text[:end])
        self._text = self._text[next_tag:]
        text = "".join(self._value)
        if self._streaming:
            self._fragments.append('"')
        elif finished:
            self._fragments.append(self._start_of_argument() + self._admitted.encode(text))
        elif text:
            self._fragments.append(self._start_of_argument() + quote(text))
        self._step = self._read_parameter_tag

    def _pass_on(self, text: str) -> None:
        if text and self._at_template_newline:
            self._at_template_newline = False
            text = text[1:]
        if not text:
            return
        if not self._admitted.is_raw:
            self._value.append(text)
            return
        if not self._streaming:
            self._streaming = True
            self._fragments.append(self._start_of_argument() + '"')
        self._fragments.append(quote(text)[1:-1])

    def _start_of_argument(self) -> str:
        start = ", " if self._given else "{"
        self._given.add(self._key)
        return f"{start}{quote(self._key)}: "

    def _end_of_arguments(self) -> str:
        return "}" if self._given else "{}"


def _opens(name: str, text: str) -> bool:
    """Whether the text opens a parameter of this name as the template does after another one."""
    tag = rf"\n{PARAMETER_END}\s*{PARAMETER}{re.escape(name)}>"
    return re.search(tag, text) is not None
