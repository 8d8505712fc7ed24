# TCMU and the NBD client of one kernel in turns, over the same backend: in user-mode Linux, or on a machine with KVM,
# which is usually nested. The script's first part is load.sh.
SIZE=64M
case $MACHINE in
'')
    ALWAYS_ASK=1
    ask() {
        echo 'measure: ask'
        read -r _ </dev/tty0
    }
    prepare_user_mode
    ;;
*) prepare_machine ;;
esac
start_local
for round in $(seq "$ROUNDS"); do each_job local_paths; done
stop tcmu nbd
