#compdef weft
# Completion of weft in zsh. Put this line into ~/.zshrc, after compinit:  source <(weft completion zsh)
# Or write it to a file _weft in a folder of $fpath.

_weft() {
    local -a lines closed open closed_shown open_shown
    local line word shown
    lines=("${(@f)$("${words[1]}" completion words -- "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2> /dev/null)}")
    for line in $lines; do
        word=${line%%$'\t'*}
        shown=$word
        [[ $line == *$'\t'* ]] && shown="${(r:32:)word}  ${line#*$'\t'}"
        if [[ $word == *[=/.] ]]; then
            open+=("$word")
            open_shown+=("$shown")
        else
            closed+=("$word")
            closed_shown+=("$shown")
        fi
    done
    compadd -l -S '' -d open_shown -a open
    compadd -l -d closed_shown -a closed
}

if [[ ${funcstack[1]} == _weft ]]; then
    _weft "$@"
else
    compdef _weft weft
fi
