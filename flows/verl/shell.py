"""Reads what a launch script of verl starts, without running anything: a small part of the language of bash.

It follows assignments, arrays, `if`, `case`, tests and the expansions of variables. Loops, functions and other commands
are passed over. A value that they compute is marked, and is an error only where a condition or a key needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

MAX_WORDS, MAX_CHARACTERS = 100_000, 10_000_000
"""Most words and characters that a script may expand to."""
MAX_ARITHMETIC = 1000
"""Most characters of an arithmetic expression whose value is computed."""
UNKNOWN = re.compile("\ue000(.*?)\ue001", re.DOTALL)
"""Marks a value that is not known, with what it would come from."""
UNKNOWN_MARKS = {"\ue000", "\ue001"}
OPERATORS = (";;", "&&", "||", ">>", "<<", "\n", ";", "&", "|", "(", ")", "<", ">")
DECLARATIONS = ("export", "declare", "local", "readonly")
NAME = r"[A-Za-z_]\w*"


class ShellError(Exception):
    """The script uses something that is not read. The message names the line."""


def unknown(source: str) -> str:
    """The mark of a value that is not known."""
    return f"\ue000{source}\ue001"


@dataclass(frozen=True)
class Part:
    """A part of a word. `text` is literal, or the inside of ${...}, $((...)) or $(...)."""

    kind: Literal["text", "variable", "arithmetic", "command"]
    text: str
    quoted: bool


@dataclass(frozen=True)
class Token:
    """A word, or an operator such as && or the end of a line."""

    line: int
    operator: str = ""
    parts: tuple[Part, ...] = ()

    @property
    def literal(self) -> str:
        """The text of an unquoted word without expansions, or ""."""
        if len(self.parts) == 1 and self.parts[0].kind == "text" and not self.parts[0].quoted:
            return self.parts[0].text
        return ""


class Lexer:
    """Splits a script into tokens."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.place, self.line = text, 0, line

    def tokens(self) -> list[Token]:
        tokens: list[Token] = []
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter in " \t\r" or self.text.startswith("\\\n", self.place):
                self._move(2 if letter == "\\" else 1)
            elif letter == "#":
                self._move(len(self.text[self.place :].partition("\n")[0]))
            else:
                tokens.append(self._operator() or Token(self.line, parts=tuple(self._word())))
                if tokens[-1].operator == "<<":
                    self._remove_here_document()
        return [*tokens, Token(self.line, operator="\n")]

    def _move(self, count: int) -> str:
        taken = self.text[self.place : self.place + count]
        self.place += count
        self.line += taken.count("\n")
        return taken

    def _remove_here_document(self) -> None:
        """Removes the lines that follow this one up to the delimiter."""
        match = re.compile(r"[<-]?[ \t]*['\"]?([^\s'\";|&<>()]+)").match(self.text, self.place)
        if match is None:
            raise ShellError(f"line {self.line}: what follows << is not read")
        rest, newline, body = self.text[match.end() :].partition("\n")
        end = re.search(rf"^\t*{re.escape(match[1])}$", body, re.MULTILINE)
        # <<< is followed by a text, without further lines
        if not match[0].startswith("<"):
            body = body[end.end() :] if end else ""
        self.text = self.text[: match.end()] + rest + newline + body

    def _operator(self) -> Token | None:
        line = self.line
        for operator in OPERATORS:
            if self.text.startswith(operator, self.place):
                self._move(len(operator))
                return Token(line, operator=operator)
        return None

    def _word(self) -> list[Part]:
        parts: list[Part] = []
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter in " \t\r\n;&|()<>":
                break
            if letter == "\\":
                escaped = self._move(2)[1:]
                parts += [Part("text", escaped, quoted=True)] if escaped != "\n" else []
            elif letter == "'":
                self._move(1)
                parts.append(Part("text", self._until("'"), quoted=True))
            elif letter == '"':
                self._move(1)
                parts += self._double_quoted()
            elif letter in "$`":
                parts.append(self._expansion(quoted=False))
            else:
                parts.append(Part("text", self._move(1), quoted=False))
        return _joined(parts)

    def _double_quoted(self) -> list[Part]:
        parts: list[Part] = []
        while self.place < len(self.text) and self.text[self.place] != '"':
            letter = self.text[self.place]
            if letter == "\\" and self.text[self.place + 1 : self.place + 2] in ('"', "\\", "$", "`", "\n"):
                parts.append(Part("text", self._move(2)[1:].strip("\n"), quoted=True))
            elif letter in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                parts.append(Part("text", self._move(1), quoted=True))
        self._close('"')
        return parts or [Part("text", "", quoted=True)]

    def _until(self, end: str) -> str:
        taken = self._move(max(0, self.text.find(end, self.place) - self.place))
        self._close(end)
        return taken

    def _close(self, end: str) -> None:
        if not self.text.startswith(end, self.place):
            raise ShellError(f"line {self.line}: a {end} is not closed")
        self._move(len(end))

    def _expansion(self, *, quoted: bool) -> Part:
        if self.text[self.place] == "`":
            self._move(1)
            return Part("command", self._until("`"), quoted)
        self._move(1)
        for opening, closing, kind in (("((", "))", "arithmetic"), ("(", ")", "command"), ("{", "}", "variable")):
            if self.text.startswith(opening, self.place):
                self._move(len(opening))
                inside = self._nested(opening[0], closing[0])
                self._close(closing)
                return Part(kind, inside, quoted)  # type: ignore[arg-type]
        name = re.compile(rf"{NAME}|[0-9@*#?$!-]").match(self.text, self.place)
        if name is None:
            return Part("text", "$", quoted)
        return Part("variable", self._move(len(name[0])), quoted)

    def _nested(self, opening: str, closing: str) -> str:
        """The text up to the closing bracket of the same depth, which is not taken."""
        start, depth = self.place, 0
        while self.place < len(self.text):
            letter = self.text[self.place]
            if letter == closing and not depth:
                return self.text[start : self.place]
            depth += (letter == opening) - (letter == closing)
            self._move(2 if letter == "\\" else 1)
        raise ShellError(f"line {self.line}: a {closing} is missing")


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Joins neighbouring literal parts that are quoted alike."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and part.kind == last.kind == "text" and part.quoted == last.quoted:
            joined[-1] = Part("text", last.text + part.text, part.quoted)
        else:
            joined.append(part)
    return joined


class Shell:
    """Follows a script. `variables` are those of the environment; `on_command` gets the words of every command."""

    def __init__(self, text: str, variables: Mapping[str, str], on_command: Callable[[list[str]], None]) -> None:
        self.tokens, self.place = Lexer(text).tokens(), 0
        self.variables: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self.on_command = on_command
        self.words = self.characters = 0
        self.ended = False
        """Whether an exit was reached. What follows is not carried out."""
        self.status: bool | None = True
        """Whether the last command succeeded. None: a command that is not run."""
        self.undecided = ""
        """Why the last test has no known result. Empty: it has one."""

    def run(self, *ends: str, active: bool = True) -> str:
        """Follows the commands up to one of the words or operators `ends`, and returns that."""
        runs_next = True
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            word = token.operator or token.literal
            if word in ends:
                self.place += 1
                return word
            self.place += bool(token.operator)
            if word in ("&&", "||", "|"):
                # the next command may stand in a later line
                while self.place < len(self.tokens) and self.tokens[self.place].operator == "\n":
                    self.place += 1
            if word in ("&&", "||") and self.undecided:
                # the next command may run or not
                start = self.place
                self._command(self.tokens[start], active=False)
                self._forget(start, active=active)
                continue
            if word in ("&&", "||"):
                runs_next = (self.status is not False) == (word == "&&")
                continue
            if word in ("\n", ";", "|", "&"):
                runs_next = True
                continue
            self._command(token, active=active and runs_next and not self.ended)
        if ends:
            raise ShellError(f"the script ends before {' or '.join(repr(end) for end in ends)}")
        return ""

    def _command(self, token: Token, *, active: bool) -> None:
        word = token.operator or token.literal
        compound = {"if": self._if, "case": self._case}.get(word)
        if compound:
            self.place += 1
            compound(token.line, active=active)
        elif word in ("{", "("):
            self.place += not token.operator
            self.run("}" if word == "{" else ")", active=active)
        elif word in ("for", "while", "until", "select"):
            self._loop(active=active)
        elif word == "function":
            # the name, and perhaps (), before the body
            self.place += 2
            while self.tokens[self.place].operator:
                self.place += 1
            self._command(self.tokens[self.place], active=False)
        elif word == "!":
            self.place += 1
            self._command(self.tokens[self.place], active=active)
            self.status = None if self.status is None else not self.status
        elif token.operator:
            raise ShellError(f"line {token.line}: {token.operator!r} is not read here")
        else:
            self._simple(token.line, active=active)

    def _loop(self, *, active: bool) -> None:
        """Passes over a loop."""
        start = self.place
        self.place += 1
        self.run("do", active=False)
        self.run("done", active=False)
        self._forget(start, active=active)

    def _forget(self, start: int, *, active: bool) -> None:
        """The variables that the tokens from `start` on assign are not known, because it is not known if they do."""
        for token in self.tokens[start : self.place]:
            match = re.match(rf"({NAME})\+?=", token.parts[0].text) if token.parts else None
            if active and match:
                self.variables[match[1]] = [unknown(f"line {token.line}")]

    def _if(self, line: int, *, active: bool) -> None:
        done = False
        end = "if"
        while end in ("if", "elif"):
            self.run("then", active=active and not done)
            if active and not done and self.undecided:
                raise ShellError(self.undecided)
            if active and not done and self.status is None:
                raise ShellError(f"line {line}: whether this 'if' holds depends on a command, and none is run")
            holds = active and not done and bool(self.status)
            end = self.run("elif", "else", "fi", active=holds)
            done = done or holds
        if end == "else":
            self.run("fi", active=active and not done)

    def _case(self, line: int, *, active: bool) -> None:
        value = _known(self._value(self.tokens[self.place]), line) if active else ""
        self.place += 1
        done = not active
        # the word `in`
        while self.tokens[self.place].operator == "\n" or self.tokens[self.place].literal == "in":
            self.place += 1
        while self.tokens[self.place].literal != "esac":
            patterns = []
            while self.tokens[self.place].operator != ")":
                token = self.tokens[self.place]
                patterns += [] if token.operator else [self._value(token)]
                self.place += 1
            self.place += 1
            holds = not done and any(fnmatchcase(value, pattern) for pattern in patterns)
            done = done or holds
            if self.run(";;", "esac", active=holds) == "esac":
                return
            while self.tokens[self.place].operator == "\n":
                self.place += 1
        self.place += 1

    def _simple(self, line: int, *, active: bool) -> None:
        """A command without sub-commands, or assignments."""
        words: list[str] = []
        is_test = self.tokens[self.place].literal == "[["
        assigning, is_declaration = True, False
        while self.place < len(self.tokens):
            token = self.tokens[self.place]
            if token.operator in ("<", ">", ">>", "<<") and not is_test:
                self._skip_redirection(token)
                continue
            if token.operator == "(" and self.tokens[self.place + 1].operator == ")":
                # the definition of a function, whose body is passed over
                self.place += 2
                self.run("{", active=False)
                self.run("}", active=False)
                return
            if token.operator and not (is_test and token.operator != "\n"):
                break
            self.place += 1
            if not active:
                self._skip_array()
                if token.literal == "]]":
                    break
                continue
            # a declaration may have options, such as declare -a
            is_declaration = is_declaration or (assigning and token.literal in DECLARATIONS)
            is_option = is_declaration and (token.literal or "").startswith("-")
            assigning = assigning and (self._assign(token) or token.literal in DECLARATIONS or is_option)
            if not assigning:
                words += [token.operator] if token.operator else self.expand(token)
            if token.literal == "]]":
                break
        if active:
            self.status, self.undecided = True, ""
            if words and words[0] in ("[", "[[", "test"):
                try:
                    self.status = self._test(words[1:] if words[0] == "test" else words[1:-1], line)
                except ShellError as error:
                    self.status, self.undecided = None, str(error)
            elif words:
                self._forget_read(words)
                self.ended = words[0] == "exit"
                self.status = {"true": True, ":": True, "false": False}.get(words[0])
                self.on_command(words)

    def _forget_read(self, words: list[str]) -> None:
        """Marks the variables that `read` sets, and removes those that `unset` names."""
        names = [word for word in words[1:] if not word.startswith("-")]
        for name in names if words[0] in ("read", "unset") else ():
            self.variables.pop(name, None)
            if words[0] == "read":
                self.variables[name] = [unknown(f"read {name}")]

    def _skip_redirection(self, token: Token) -> None:
        self.place += 1
        while self.tokens[self.place].operator in ("&", ">"):
            self.place += 1
        self.place += not self.tokens[self.place].operator

    def _skip_array(self) -> None:
        if self.tokens[self.place].operator == "(" and self.tokens[self.place - 1].literal.endswith("="):
            while self.tokens[self.place].operator != ")":
                self.place += 1
            self.place += 1

    def _assign(self, token: Token) -> bool:
        """Carries out NAME=value, NAME+=value or NAME=(values). Returns whether the word is one of these."""
        first = token.parts[0]
        match = re.match(rf"({NAME})(\+?)=", first.text) if first.kind == "text" and not first.quoted else None
        if match is None:
            return False
        rest = (Part("text", first.text[match.end() :], quoted=False), *token.parts[1:])
        if self.tokens[self.place].operator == "(" and not "".join(part.text for part in rest):
            self.place += 1
            values = []
            while self.tokens[self.place].operator != ")":
                entry = self.tokens[self.place]
                values += [] if entry.operator else self.expand(entry)
                self.place += 1
            self.place += 1
            before = self.variables.get(match[1], []) if match[2] else []
            self.variables[match[1]] = [*before, *values]
        else:
            value = self._value(Token(token.line, parts=rest))
            if not rest[0].quoted and re.match(r"~(/|$)", rest[0].text):
                value = "".join(self.variables.get("HOME", ["~"])) + value[1:]
            before_text = "".join(self.variables.get(match[1], [])[:1]) if match[2] else ""
            self.variables[match[1]] = [before_text + value]
        return True

    # -- expansion ---------------------------------------------------------------------------------------------

    def expand(self, token: Token) -> list[str]:
        """The words that a word becomes."""
        fields: list[str] = []
        text: str | None = None
        for number, part in enumerate(token.parts):
            values = self._part(part, token.line)
            home = re.match(rf"({NAME}=)?~(?=/|$)", part.text) if part.kind == "text" and not number else None
            if home and not part.quoted:
                values = [(home[1] or "") + "".join(self.variables.get("HOME", ["~"])) + part.text[home.end() :]]
            if part.kind != "text" and not part.quoted:
                values = [piece for value in values for piece in _split(value)]
            for place, value in enumerate(values):
                if place:
                    fields.append(text or "")
                    text = value
                else:
                    text = (text or "") + value
        fields = fields if text is None else [*fields, text]
        self._count(fields, token.line)
        return fields

    def _count(self, words: Sequence[str], line: int) -> None:
        """Raises ShellError for a script that expands to too much."""
        self.words += len(words)
        self.characters += sum(map(len, words))
        if self.words > MAX_WORDS or self.characters > MAX_CHARACTERS:
            raise ShellError(
                f"line {line}: the script expands to more than {MAX_WORDS:,} words or {MAX_CHARACTERS:,} characters"
            )

    def _value(self, token: Token) -> str:
        """The value of a word that is not split, as in an assignment."""
        value = "".join(" ".join(self._part(part, token.line)) for part in token.parts)
        self._count([value], token.line)
        return value

    def _part(self, part: Part, line: int) -> list[str]:
        if part.kind == "text":
            return [part.text]
        if part.kind == "command":
            return [unknown(f"$({part.text})")]
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text, line)]
        return self._variable(part.text, line)

    def _variable(self, text: str, line: int) -> list[str]:
        """The value of ${text}."""
        if text == "#":
            return ["0"]
        match = re.fullmatch(rf"({NAME}|[0-9@*])(\[[@*0]\])?(?:(:?[-=?+])(.*))?", text, re.DOTALL)
        if match is None:
            return [unknown("${" + text + "}")]
        name, index, operation, word = match.groups()
        if name in ("@", "*"):
            return []
        values = self.variables.get(name)
        if values is not None and index in (None, "[0]"):
            values = values[:1] or [""]
        is_set = values is not None and (not (operation or "").startswith(":") or bool(_without_unset(values)))
        kind = (operation or "").lstrip(":")
        if kind == "+":
            return self._text(word, line) if is_set else [""]
        if is_set and values is not None:
            return values
        if kind in ("-", "="):
            given = self._text(word, line)
            if kind == "=":
                self.variables[name] = given
            return given
        return [] if index else [unknown(f"${name}")]

    def _text(self, word: str, line: int) -> list[str]:
        """The value of a text with expansions, such as a default."""
        if re.match(r"~(/|$)", word):
            word = "".join(self.variables.get("HOME", ["~"])) + word[1:]
        lexer = Lexer(f'"{word}"' if '"' not in word and "'" not in word else word, line)
        return ["".join(self._value(token) for token in lexer.tokens() if not token.operator)]

    def _arithmetic(self, text: str, line: int) -> str:
        text = "".join(" ".join(self._part(part, line)) for part in Lexer(f'"{text}"', line)._word())
        if len(text) > MAX_ARITHMETIC:
            return unknown(f"$(({text[:20]}…))")
        # names without $ are variables too
        for name in set(re.findall(rf"(?<![\w\ue000$])({NAME})", UNKNOWN.sub("", text))):
            value = "".join(self.variables.get(name, [unknown(f"${name}")])[:1])
            # in a template, a backslash has a meaning
            text = re.sub(rf"\b{name}\b", value.replace("\\", r"\\"), text)
        # bash rounds a negative quotient towards 0, and Python down
        is_rounded_otherwise = "-" in text and re.search("[/%]", text)
        is_read = re.fullmatch(r"[\d\s()+*/%-]{1,200}", text) and "**" not in text and not is_rounded_otherwise
        if UNKNOWN.search(text) or not is_read:
            return unknown(f"$(({text}))" if not UNKNOWN.search(text) else UNKNOWN.findall(text)[0])
        try:
            return str(int(eval(text.replace("/", "//"), {"__builtins__": {}})))
        except (SyntaxError, ZeroDivisionError, ValueError, TypeError):
            return unknown(f"$(({text}))")

    # -- conditions --------------------------------------------------------------------------------------------

    def _test(self, words: list[str], line: int) -> bool | None:
        """The result of [ ... ]. Raises ShellError for a condition that is not known."""
        for operator, combine in (("||", any), ("&&", all)):
            if operator in words:
                place = words.index(operator)
                sides = (words[:place], words[place + 1 :])
                return combine(bool(self._test(side, line)) for side in sides)
        if words[:1] == ["!"]:
            return not self._test(words[1:], line)
        values = [_known(word, line) for word in words]
        match values:
            case ["-z", value]:
                return not value
            case ["-n", value] | [value]:
                return bool(value)
            case ["-e" | "-f" | "-d" as operator, value]:
                path = Path(value)
                return {"-e": path.exists, "-f": path.is_file, "-d": path.is_dir}[operator]()
            case [left, "=" | "==" | "!=" as operator, right]:
                return fnmatchcase(left, right) == (operator != "!=")
            case [left, "-eq" | "-ne" | "-gt" | "-ge" | "-lt" | "-le" as operator, right]:
                return _compare(left, operator, right, line)
        raise ShellError(f"line {line}: the condition {' '.join(values)!r} is not read; give the keys by --override")


def _compare(left: str, operator: str, right: str, line: int) -> bool:
    try:
        first, second = int(left or 0), int(right or 0)
    except ValueError:
        raise ShellError(f"line {line}: {left!r} {operator} {right!r} compares what are no numbers") from None
    results = {
        "-eq": first == second, "-ne": first != second, "-gt": first > second, "-ge": first >= second,
        "-lt": first < second, "-le": first <= second,
    }  # fmt: skip
    return results[operator]


def _split(value: str) -> list[str]:
    """Splits an unquoted value at its spaces, but not within the mark of an unknown value."""
    return re.findall(r"(?:\ue000.*?\ue001|\S)+", value, re.DOTALL)


def _without_unset(values: Sequence[str]) -> str:
    """The values without marks of variables that are not set."""
    return re.sub(rf"\ue000\$(?:{NAME}|[0-9])\ue001", "", "".join(values))


def _known(value: str, line: int) -> str:
    """A value in a condition, where a variable that is not set is empty. Raises ShellError for a command's value."""
    value = _without_unset([value])
    source = UNKNOWN.search(value)
    if source:
        name = "give the variable that it is assigned to in the environment, as in DEVICE=gpu ostinato import …"
        raise ShellError(f"line {line}: a condition depends on {source[1]!r}, and no command is run; {name}")
    return value
