
# The keys of --disk, by the command that has them.
_walvisor_disk_keys() {
    case $1 in
        KEYS
    esac
}

# The values of a key, if they are words.
_walvisor_disk_values() {
    case $1 in
        VALUES
    esac
}

# As _walvisor, and the value of --disk: a key after each comma, a value after each '='. bash makes a word of each '='.
_walvisor_with_disks() {
    local at=$COMP_CWORD spec= word command=serve
    while ((at > 0)) && [[ ${COMP_WORDS[at]} != -* ]]; do
        spec=${COMP_WORDS[at]}$spec
        at=$((at - 1))
    done
    if [[ ${COMP_WORDS[at]} != --disk ]]; then
        _walvisor "$@"
        return
    fi
    for word in "${COMP_WORDS[@]:1:2}"; do
        case $word in
            run | nbd | vhost-user | tcmu | ublk) command=$word ;;
        esac
    done
    local part=${spec##*,} last=${COMP_WORDS[COMP_CWORD]}
    if [[ $part != *=* ]]; then
        # The word that is completed begins with the parts before this one.
        COMPREPLY=($(compgen -P "${last%"$part"}" -W "$(_walvisor_disk_keys $command)" -- "$part"))
        compopt -o nospace
    elif [[ ${part%%=*} == path || ${part%%=*} == log || ${part%%=*} == socket ]]; then
        compopt -o filenames -o nospace
        COMPREPLY=($(compgen -f -- "${part#*=}"))
    else
        COMPREPLY=($(compgen -W "$(_walvisor_disk_values "${part%%=*}")" -- "${part#*=}"))
        compopt -o nospace
    fi
}
complete -F _walvisor_with_disks -o nosort -o bashdefault -o default walvisor
