# The demonstration: two write-ahead-logged disks on one log, one over either transport. A guest runs fio on one after the
# other; a second one, whose counters are then those of that job alone, on both at once. Then a check of both.
set -e
for transport in mmio pci; do
    walvisor disk create $transport.img --size 256M --log log
done
progress 'booting Debian'
guest_initrd demo.cpio "$JOB/guest.sh" fio
guest_initrd together.cpio "$JOB/guest-together.sh" fio
set +e
# demo_guest NAME: runs the guest of NAME.cpio to its end.
demo_guest() {
    run_guest $1 480 --kernel "$IMAGES/vmlinux" --initrd $1.cpio --cpus 1 --memory 1G \
        --cmdline 'console=ttyS0 quiet panic=-1 reboot=t' --metrics "$RESULTS/$1.prom" \
        --disk path=mmio.img,log=log,transport=mmio,queues=2,serial=mmio \
        --disk path=pci.img,log=log,transport=pci,queues=2,serial=pci || exit
    grep -q 'guest: job exit 0' "$RESULTS/$1.log" || exit 1
    guest_files $1 || exit 1
}
demo_guest demo
progress 'booting Debian again, for fio on both disks at once'
demo_guest together
status=0
for transport in mmio pci; do
    progress "walvisor disk check $transport.img --log log"
    walvisor disk check $transport.img --log log --json >"$RESULTS/check-$transport.json" || status=1
    cat "$RESULTS/check-$transport.json"
done
exit $status
