# Sets the wall clock of this machine, which belongs to the test. Waits are measured in processor time: a wait that
# ends too early is repeated at once and for ever, which takes much of it. $LEAP is the program of leap.c.

# Not the time of day.
uptime_seconds() { cut -d. -f1 /proc/uptime; }

# ticks PID: processor time so far, in 1/100 s.
ticks() { echo $(($(cut -d' ' -f14,15 "/proc/$1/stat" | tr ' ' +))); }

# set_clocks_while NAME: sets the clock forward by a day, back by two days, and through a leap second, until the file
# NAME exists.
set_clocks_while() {
    started=$(date +%s) began=$(uptime_seconds) steps=0 leaps=0
    until [ -e "$1" ] && [ $steps -ge 4 ]; do
        date -s "@$(($(date +%s) + 86400))" >/dev/null && steps=$((steps + 1))
        sleep 0.5
        date -s "@$(($(date +%s) - 172800))" >/dev/null && steps=$((steps + 1))
        sleep 0.5
        # Five seconds before the next midnight: the commands before the leap second may take some of them.
        date -s "@$(($(date +%s) / 86400 * 86400 + 86395))" >/dev/null
        tai=$("$LEAP" insert) || exit 1
        sleep 7
        leaps=$((leaps + $("$LEAP" clear) - tai))
    done
    date -s "@$((started + $(uptime_seconds) - began))" >/dev/null
    [ $leaps -ge 1 ] && echo "$clock_of: the clock was set and had a leap second"
}

# idle PID: the processor time that it takes in 3 s without any requests.
idle() {
    idle_before=$(ticks $1)
    sleep 3
    echo $(($(ticks $1) - idle_before))
}
