# Takes an address by DHCP on one network and a fixed one on the other, fetches the file, and sends it back.
device() {
    for one in /sys/class/net/*; do
        [ "$(cat "$one/address")" = "$1" ] && echo "${one##*/}"
    done
}
outside=$(device 02:00:00:00:00:01) inside=$(device 02:00:00:00:00:02)
for one in "$outside" "$inside"; do
    ip link set "$one" up
    case $(readlink -f "/sys/class/net/$one") in */pci*) transport=pci ;; *) transport=mmio ;; esac
    echo "guest: $transport, mtu $(cat "/sys/class/net/$one/mtu"), carrier $(cat "/sys/class/net/$one/carrier")"
done
cat >/tmp/lease <<'END'
#!/bin/sh
[ "$1" = bound ] || exit 0
ip addr add "$ip/$mask" dev "$interface"
ip route add default via "$router"
echo "$router" >/tmp/router
END
chmod 755 /tmp/lease
udhcpc -q -n -t 10 -i "$outside" -s /tmp/lease >/tmp/udhcpc 2>&1 || cat /tmp/udhcpc
ip addr add 10.9.0.2/24 dev "$inside"
fetch() {
    tries=0
    until wget -q -O /tmp/file "http://$1:8080/file"; do
        tries=$((tries + 1))
        [ $tries -lt 20 ] || return 1
        sleep 1
    done
    echo "guest: $2 $(sha256sum </tmp/file | cut -d' ' -f1)"
    echo "guest: back $(wget -q -O - --post-file=/tmp/file "http://$1:8080/cgi-bin/sum" | cut -d' ' -f1)"
}
fetch "$(cat /tmp/router)" passt
if [ "$(head -c 5 /dev/vda)" != again ]; then
    # A reset in the middle of frames that come and go: passt goes on with the next boot.
    echo again | dd of=/dev/vda bs=512 conv=fsync,sync 2>/dev/null
    for _ in 1 2 3 4; do
        wget -q -O /dev/null "http://$(cat /tmp/router):8080/file" &
        wget -q -O /dev/null --post-file=/tmp/file "http://$(cat /tmp/router):8080/cgi-bin/sum" &
    done
    usleep 200000
    echo 'guest: resets'
    # At once, with frames under way. `reboot -f` would first break the queues, and virtio-net of 6.1.192 then spins in
    # start_xmit for ever: virtqueue_enable_cb_delayed finds used buffers, and a broken queue gives none back.
    echo b >/proc/sysrq-trigger
fi
fetch 10.9.0.1 tap
echo "guest: both networks work"
seconds=0
while [ "$(cat "/sys/class/net/$outside/carrier")" = 1 ] && [ $seconds -lt 60 ]; do
    sleep 1
    seconds=$((seconds + 1))
done
echo "guest: the first carrier is $(cat "/sys/class/net/$outside/carrier"), the second $(cat "/sys/class/net/$inside/carrier")"
fetch 10.9.0.1 again
echo hello | dd of=/dev/vda bs=512 conv=fsync,sync 2>/dev/null
echo "guest: wrote: status $?"
