# The demonstration: one guest with a write-ahead-logged disk over either transport, then a check of both.
set -e
for transport in mmio pci; do
    walvisor disk create $transport.img --size 256M
done
progress 'booting Debian'
guest_initrd initrd "$JOB/guest.sh" fio
set +e
run_guest demo 480 --kernel "$IMAGES/vmlinux" --initrd initrd --cpus 2 --memory 1G \
    --cmdline 'console=ttyS0 quiet panic=-1 reboot=t' --metrics "$RESULTS/metrics.prom" \
    --disk path=mmio.img,transport=mmio,queues=2,serial=mmio \
    --disk path=pci.img,transport=pci,queues=2,serial=pci || exit
grep -q 'guest: job exit 0' "$RESULTS/demo.log" || exit 1
guest_files demo || exit 1
status=0
for transport in mmio pci; do
    progress "walvisor disk check $transport.img"
    walvisor disk check $transport.img --json >"$RESULTS/check-$transport.json" || status=1
    cat "$RESULTS/check-$transport.json"
done
exit $status
