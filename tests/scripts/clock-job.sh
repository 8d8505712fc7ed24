# The clock is set while the disk of a guest of `walvisor run` commits. Runs on a Debian machine of its own, whose clock
# it may set. Its first part is clock-functions.sh.
LEAP=$WORK/leap
base64 -d "$JOB/leap.base64" >leap && chmod +x leap || exit 1
walvisor disk create clock.img --size 32M || exit
guest_initrd initrd "$JOB/guest.sh"
start_guest clock --kernel "$IMAGES/vmlinux" --initrd initrd --cpus 1 --memory 512M --control ctl \
    --cmdline 'console=ttyS0 quiet mitigations=off panic=-1 reboot=t' \
    --disk path=clock.img,transport=mmio,commit-wait-usec=3000,commit-wait-count=64
clock_of='job: run' vmm=$(cat "$WORK/clock.pid")
wait_line clock 'guest: commits 1' 60 || { spoken clock; exit 1; }
before=$(ticks $vmm)
wait_line clock 'guest: commits 2' 60 || { spoken clock; exit 1; }
quiet=$(($(ticks $vmm) - before)) before=$(ticks $vmm)
# Runs the same amount of work as before, whatever the guest did meanwhile.
{ wait_line clock 'guest: commits 3' 120; touch ended; } &
set_clocks_while ended
wait $!
echo "job: run quiet $quiet stepped $(($(ticks $vmm) - before)) idle 0 $(idle $vmm)"
walvisor ctl ctl resize --disk clock.img --size 48M >/dev/null || echo 'job: no resize'
wait_guest clock 120
echo "job: run: status $?"
