# What an administrator does with the package and its units. Each line that begins with `guest: ` is compared by the test.
files() { find /usr /etc /var/lib /run/walvisor -name '*walvisor*' 2>/dev/null | sort; }
files >/root/before
package() {
    dpkg "$@" >/root/dpkg 2>&1 && return
    cat /root/dpkg
    echo "guest: dpkg $1 failed"
}
package -i /root/walvisor.deb
echo "guest: installed: $(systemctl is-enabled walvisor-nbd.socket)"
mkdir /var/lib/walvisor
walvisor disk create /var/lib/walvisor/disk.img --size 1G
walvisor disk create /var/lib/walvisor/vm.img --size 64M
state() { echo "guest: $1: $(systemctl is-active walvisor-nbd.socket walvisor-nbd.service | tr '\n' ' ')"; }
systemctl -q enable walvisor-nbd.socket walvisor-nbd.service walvisor-vhost-user.socket walvisor-vhost-user.service
echo "guest: enabled: $(systemctl is-enabled walvisor-nbd.socket walvisor-nbd.service | tr '\n' ' ')"
systemctl start walvisor-nbd.socket
state 'socket started'

# A client that writes and flushes, and connects again whenever the daemon has gone.
cat >/root/client <<'END'
import nbd, sys
# 4 KiB blocks until it has connected again so many times, each with its number in it.
wanted, restarts, told, n = int(sys.argv[1]), 0, None, 0
def connect():
    # A daemon that is ending may still accept.
    while True:
        try:
            h = nbd.NBD()
            h.connect_uri('nbd+unix:///disk.img?socket=/run/walvisor/disk.sock')
            return h
        except nbd.Error:
            pass
def block(n):
    return n.to_bytes(4, 'little') * 1024
h = connect()
while restarts < wanted or n < 10:
    try:
        h.pwrite(block(n), n * 4096)
        h.flush()
        n += 1
        if told != restarts:
            open('/root/restarts', 'w').write(str(restarts))
            told = restarts
    except nbd.Error:
        restarts += 1
        h = connect()
wrong = sum(h.pread(4096, at * 4096) != block(at) for at in range(n))
print('guest: client: all its blocks are there' if wrong == 0 else f'guest: client: {wrong} blocks are wrong', flush=True)
END
python3 /root/client 0
state 'a client came'
# By what systemd notes of its dynamic users: this machine may have neither ps nor the library that knows their names.
uid=$(stat -c %u "/proc/$(systemctl show -P MainPID walvisor-nbd.service)")
echo "guest: it runs as $(readlink "/run/systemd/dynamic-uid/direct:$uid")"
# A disk that root makes later belongs to root.
walvisor disk create /var/lib/walvisor/later.img --size 1M
chown -R --reference /var/lib/walvisor/ /var/lib/walvisor/later.img*

rm /root/restarts
python3 /root/client 4 &
client=$!
comes_back() { until [ "$(cat /root/restarts 2>/dev/null || echo -1)" -ge $1 ]; do sleep 0.1; done; }
for time in 1 2 3; do
    comes_back $((time - 1))
    systemctl restart walvisor-nbd.service
    echo "guest: restart $time: $?"
done
comes_back 3
systemctl kill -s KILL walvisor-nbd.service
wait $client
state 'after a kill'

began=$(date +%s)
systemctl stop walvisor-nbd.socket walvisor-nbd.service
echo "guest: stopped: $? $(systemctl show -P Result walvisor-nbd.service) $(systemctl show -P ExecMainStatus walvisor-nbd.service)"
[ $(($(date +%s) - began)) -lt 300 ] && echo 'guest: within TimeoutStopSec'
walvisor disk check /var/lib/walvisor/disk.img >/dev/null && echo 'guest: the disk is clean'

systemctl start walvisor-vhost-user.service
echo "guest: vhost-user: $(systemctl is-active walvisor-vhost-user.service)"
[ -S /run/walvisor/vm.sock ] && systemctl stop walvisor-vhost-user.socket walvisor-vhost-user.service
echo "guest: vhost-user stopped: $(systemctl show -P Result walvisor-vhost-user.service)"

journalctl --no-pager -o cat -u walvisor-nbd.service >/root/journal
sed 's/^/journal: /' /root/journal
echo "guest: journal: $(grep -c '^Started' /root/journal) starts"
grep -q '^serving /var/lib/walvisor/disk.img: 1 GiB at nbd+unix:' /root/journal && echo 'guest: journal: what walvisor prints'

# The package is removed while a daemon runs. A sixth start within ten seconds would be one too many.
systemctl reset-failed
systemctl start walvisor-nbd.socket
python3 /root/client 0
package --remove walvisor
echo "guest: removed: $(systemctl is-active walvisor-nbd.service)"
ls /var/lib/walvisor | sed 's/^/guest: kept: /'
rm -r /var/lib/walvisor/*
package --purge walvisor
files >/root/after
diff /root/before /root/after && [ ! -e /run/walvisor ] && echo 'guest: purged: nothing is left'
echo 'guest: end'
