"""`maxlib completion SHELL`: prints a script that completes commands and options."""

import argparse

SHELLS = {
    "bash": 'eval "$(maxlib completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(maxlib completion zsh)" in ~/.zshrc',
    "fish": "maxlib completion fish > ~/.config/fish/completions/maxlib.fish",
}
BASH = """\
_maxlib() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} --help --version"
    elif [ "${{word#-}}" != "$word" ]; then
        case $command in
{options}
        esac
    else
        case $command:${{COMP_WORDS[COMP_CWORD-1]}} in
{choices}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _maxlib maxlib
"""


def add(parser: argparse.ArgumentParser) -> None:
    lines = "; ".join(f"{shell}: {how}" for shell, how in SHELLS.items())
    parser.add_argument("shell", choices=SHELLS, help=f"how to install it: {lines}")


def run(args: argparse.Namespace) -> int:
    from maxlib._command import COMMANDS

    actions = {name: _actions(name) for name in COMMANDS}
    if args.shell == "fish":
        print(_fish(COMMANDS, actions))
    else:
        print(("autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else "") + _bash(actions), end="")
    return 0


def _actions(name: str) -> list[argparse.Action]:
    """Returns the arguments and options of a command."""
    from maxlib._command import parser

    (commands,) = (action for action in parser(name)._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices[name]._actions


def _bash(actions: dict[str, list[argparse.Action]]) -> str:
    options = [
        f'            {name}) words="{" ".join(option for action in arguments for option in action.option_strings)}" ;;'
        for name, arguments in actions.items()
    ]
    choices = [
        f'            {name}:{before}) words="{" ".join(map(str, action.choices))}" ;;'
        for name, arguments in actions.items()
        for action in arguments
        if action.choices
        for before in (action.option_strings or [name])
    ]
    return BASH.format(commands=" ".join(actions), options="\n".join(options), choices="\n".join(choices))


def _fish(commands: dict[str, str], actions: dict[str, list[argparse.Action]]) -> str:
    lines = [f"complete -c maxlib -n __fish_use_subcommand -a {n} -d {_quoted(text)}" for n, text in commands.items()]
    for name, arguments in actions.items():
        for action in arguments:
            long = [f"-l {option[2:]}" for option in action.option_strings if option.startswith("--")]
            values = [f"-x -a {_quoted(' '.join(map(str, action.choices)))}"] if action.choices else []
            if long or values:
                parts = [f"complete -c maxlib -n '__fish_seen_subcommand_from {name}'", *long, *values]
                lines.append(" ".join(parts))
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
