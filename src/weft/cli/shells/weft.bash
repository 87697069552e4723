# Completion of weft in bash. Put this line into ~/.bashrc:  source <(weft completion bash)

_weft() {
    local line=${COMP_LINE:0:COMP_POINT} current="" word
    local -a words
    read -ra words <<< "$line"
    if [[ $line != *[[:space:]] ]]; then
        current=${words[-1]}
        unset 'words[-1]'
    fi
    # bash starts a new word after each of these characters, so it replaces only the part after them
    local head=${current%"${current##*[=:@]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        word=${word#"$head"}
        [[ $word == *" "* ]] && printf -v word '%q' "$word"
        COMPREPLY+=("$word")
    done < <("${words[0]}" completion words -- "${words[@]:1}" "$current" 2> /dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/.] ]]; then
        compopt -o nospace 2> /dev/null
    fi
}

complete -o nosort -F _weft weft
