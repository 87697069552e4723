# Completion of weft in fish. Run once:  weft completion fish > ~/.config/fish/completions/weft.fish

function __weft_words
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l command $words[1]
    set -e words[1]
    $command completion words -- $words "$current" 2>/dev/null
end

complete -c weft -f -a '(__weft_words)'
