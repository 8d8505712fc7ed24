# One daemon serves disks of one log over vhost-user, NBD and TCMU. Runs in user-mode Linux, in a directory of the
# machine; $WALVISOR is the program and $DOORS the one that writes and checks, and the kernel's modules are below $PLACE.
config=/sys/kernel/config
load() { for module; do modprobe -d "$PLACE" "$module"; done; }
load configfs
mount -t configfs configfs $config
load target_core_user sd_mod tcm_loop nbd
say() { echo "guest: $*"; }

# serve NAME COUNT ARGUMENTS: starts a daemon, and waits for its disks.
serve() {
    name=$1 count=$2
    shift 2
    : >"$name.served"
    "$WALVISOR" serve "$@" --metrics "$name.prom" >"$name.served" 2>"$name.log" &
    daemon=$!
    until [ "$(wc -l <"$name.served")" = "$count" ]; do
        kill -0 $daemon 2>/dev/null || { cat "$name.log"; exit 1; }
        sleep 0.1
    done
}
export_at() { nbd-client -unix n "/dev/nbd$1" -N "$2" >attached 2>&1 || { cat attached; exit 1; }; }
# serve_three NAME [,KEY=VALUE...]: the keys are those of the log.
serve_three() {
    log=log=log$2
    serve "$1" 3 --disk path=a.img,"$log",door=vhost-user,socket=v --disk path=b.img,"$log",door=nbd,socket=n \
        --disk path=c.img,"$log",door=tcmu
    export_at 0 b.img
    disks="v /dev/nbd0 /dev/$(sed -n 's|^serving c: .* at /dev/\([a-z]*\) .*|\1|p' "$1.served")"
}
stop() {
    kill -TERM $daemon
    wait $daemon
    say "$name: status $?"
    cat "$name.log"
}

for disk in a b c; do "$WALVISOR" disk create $disk.img --size 16M --log log || exit; done
serve_three first
for round in 1 2 3; do
    rm -f killed
    "$DOORS" load state $disks --until killed >"load.$round" 2>&1 &
    load=$!
    until grep -q busy "load.$round"; do
        kill -0 $load 2>/dev/null || { cat "load.$round"; exit 1; }
        sleep 0.1
    done
    : >killed
    kill -KILL $daemon
    wait $daemon
    nbd-client -d /dev/nbd0 >/dev/null
    serve_three "round-$round"
    wait $load || cat "load.$round"
    "$DOORS" check state $disks && say "kill $round: nothing lost"
done
nbd-client -d /dev/nbd0 >/dev/null
stop "round-$round"

# What a sync serves. The files of this kernel's one processor sync at once, so that a group forms only if it waits.
wait_for_three=,commit-wait-count=3,commit-wait-usec=100000
serve_three three $wait_for_three
"$DOORS" load state $disks --writes 300 >three.load 2>&1 || cat three.load
nbd-client -d /dev/nbd0 >/dev/null
stop three
for disk in a b c; do "$WALVISOR" disk check $disk.img --log log >/dev/null && say "$disk: checked"; done

# The same through one door.
for disk in d e f; do "$WALVISOR" disk create $disk.img --size 16M --log nbd.log || exit; done
log=log=nbd.log$wait_for_three
serve one 3 --disk path=d.img,"$log",door=nbd,socket=n --disk path=e.img,"$log",door=nbd,socket=n \
    --disk path=f.img,"$log",door=nbd,socket=n
export_at 1 d.img && export_at 2 e.img && export_at 3 f.img
"$DOORS" load one.state /dev/nbd1 /dev/nbd2 /dev/nbd3 --writes 300 >one.load 2>&1 || cat one.load
for device in 1 2 3; do nbd-client -d /dev/nbd$device >/dev/null; done
stop one
