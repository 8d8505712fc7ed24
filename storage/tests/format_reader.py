#!/usr/bin/env python3
"""Lists the records of a log: a second reader of the format, written from FORMAT.md alone.

usage: format_reader.py DIR                          a JSON object a record on stdout
       format_reader.py DIR SNAPSHOT DISK IMAGE OUT  the disk of this number as of a snapshot, in a log without rewinds
Exit status 1 and one line on stderr if it is damaged.
"""
import json
import os
import re
import struct
import sys

BLOCK, SLOT = 4096, 65536
VERSION = 7
KINDS = {1: "write", 2: "write_zeroes", 3: "discard", 4: "mark", 5: "rewind"}

TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


class Damaged(Exception):
    pass


def sealed(data, magic):
    """Whether magic and CRC of a structure are right."""
    return data[:8] == magic and struct.unpack_from("<I", data, 12)[0] == crc32c(data[:12] + bytes(4) + data[16:])


def check_version(data, name, known=VERSION):
    (version,) = struct.unpack_from("<I", data, 8)
    if version != known:
        raise Damaged(f"{name}: version {version}")


class Control:
    def __init__(self, path):
        data = open(path, "rb").read()
        newest = None
        for slot in (data[:SLOT], data[SLOT : 2 * SLOT]):
            if len(slot) != SLOT or not sealed(slot, b"WALVCTRL"):
                continue
            check_version(slot, path)
            if newest is None or struct.unpack_from("<Q", slot, 16) > struct.unpack_from("<Q", newest, 16):
                newest = slot
        if newest is None:
            raise Damaged(f"{path}: no valid slot")
        self.log = newest[24:40]
        self.segment_size, max_segments, disk_count = struct.unpack_from("<QII", newest, 40)
        self.first_sequence, self.checkpoint_lsn = struct.unpack_from("<QQ", newest, 56)
        self.copying_lsn, self.durable_lsn, image_count = struct.unpack_from("<QQI", newest, 88)
        size_right = SLOT <= self.segment_size <= 1 << 30 and self.segment_size % BLOCK == 0
        if not size_right or not 4 <= max_segments <= 65536 or disk_count > 104:
            raise Damaged(f"{path}: out of its limits")
        home = os.path.dirname(os.path.dirname(os.path.realpath(path)))
        self.disks, self.void_lsn, self.uuids = {}, {}, {}
        for i in range(disk_count):
            entry = newest[112 + 624 * i :][:624]
            disk_id, path_len = struct.unpack_from("<IH", entry, 16)
            self.uuids[disk_id] = entry[:16]
            size, _, _, self.void_lsn[disk_id] = struct.unpack_from("<4Q", entry, 24)
            image = os.fsdecode(entry[144 : 144 + path_len])
            self.disks[disk_id] = (size, image and os.path.join(home, image))
        history = 112 + 624 * disk_count
        (snapshot_count,) = struct.unpack_from("<I", newest, history + 4)
        first_image = history + 16 + 96 * snapshot_count
        if first_image + 24 * image_count > SLOT:
            raise Damaged(f"{path}: too full")
        # Name, LSN, number of saved records, only disk.
        self.snapshots = []
        for i in range(snapshot_count):
            name, lsn, _, _, saved, disk_id = struct.unpack_from("<64s3QII", newest, history + 16 + 96 * i)
            self.snapshots.append((name.rstrip(b"\0").decode(), lsn, saved, disk_id))
        images = [struct.unpack_from("<IIQQ", newest, first_image + 24 * i) for i in range(image_count)]
        # The LSN at which the past of a disk begins.
        self.since = {disk_id: since for disk_id, _, since, _ in images}
        self.spilled = {disk_id for disk_id, spilled, _, _ in images if spilled}


class Segment:
    def __init__(self, directory, name, control):
        self.name = name
        self.data = open(os.path.join(directory, name), "rb").read()
        if len(self.data) != control.segment_size:
            raise Damaged(f"{name}: {len(self.data)} bytes")
        header = self.data[:64]
        self.state = "suspect"
        if sealed(header, b"WALVSEGM"):
            check_version(header, name)
            (self.crc,) = struct.unpack_from("<I", header, 12)
            self.sequence, self.previous_sequence, self.previous_lsn, self.salt = struct.unpack_from("<4Q", header, 32)
            ours = header[16:32] == control.log and self.sequence >= control.first_sequence
            self.state = "candidate" if ours else "free"


class SavedPart:
    """A saved file, whose first record follows the one with this number."""

    def __init__(self, directory, lsn, part, number, control):
        self.name = f"saved-{lsn:020}-{part:05}"
        try:
            self.data = open(os.path.join(directory, self.name), "rb").read()
        except FileNotFoundError:
            raise Damaged(f"{self.name}: missing")
        header = self.data[:64]
        if len(header) < 64 or not sealed(header, b"WALVSEGM"):
            raise Damaged(f"{self.name}: no header")
        check_version(header, self.name)
        (self.crc,) = struct.unpack_from("<I", header, 12)
        self.sequence, before, first, self.salt = struct.unpack_from("<4Q", header, 32)
        if header[16:32] != control.log or (self.sequence, before, first) != (part + 1, part, number):
            raise Damaged(f"{self.name}: another file's header")


class Batch:
    def __init__(self, fields, crc, descriptors, checksums, payload_at):
        self.crc, self.descriptors, self.checksums, self.payload_at = crc, descriptors, checksums, payload_at
        (self.sequence, self.salt, self.cid, self.first_lsn, self.durable_lsn, self.unix_us, self.previous_crc, _, _, self.payload_bytes) = fields
        self.last_lsn = self.first_lsn + len(descriptors) - 1


def batch_of(data, at, offset, segment, log):
    """The batch whose header is in `data` at `at` and belongs at `offset` of the segment, and the header's length with
    descriptors and checksums; None if they are not right in themselves."""
    if len(data) < at + 96 or data[at : at + 8] != b"WALVBATC" or data[at + 16 : at + 32] != log:
        return None
    fields = struct.unpack_from("<6QIHHQ", data, at + 32)
    first_lsn, count, checksum_count, payload_bytes = fields[3], *fields[7:10]
    behind = at + 96 + 20 * count
    end = behind + 4 * checksum_count
    if first_lsn >= 1 << 60 or not 1 <= count <= 896 or checksum_count > 4096 or end > len(data):
        return None
    if not sealed(data[at:end], b"WALVBATC"):
        return None
    check_version(data[at:end], segment.name)
    descriptors = [struct.unpack_from("<IIQI", data, at + 96 + 20 * i) for i in range(count)]
    if any(kind not in KINDS for _, kind, _, _ in descriptors):
        return None
    payloads = [payload_len(kind, sectors) for _, kind, _, sectors in descriptors]
    if payload_bytes != sum(payloads) or checksum_count != sum(-(-size // BLOCK) for size in payloads):
        return None
    checksums = struct.unpack_from(f"<{checksum_count}I", data, behind)
    payload_at = offset + blocks(end - at)
    return Batch(fields, struct.unpack_from("<I", data, at + 12)[0], descriptors, checksums, payload_at), end - at


def batch_at(segment, offset, log):
    """The batch whose header and descriptors at `offset` are right in themselves, or None."""
    found = batch_of(segment.data, offset, offset, segment, log) if offset + BLOCK <= len(segment.data) else None
    return found and found[0]


def follows(batch, segment, offset, previous_crc, last, room):
    """Whether the batch at `offset` follows the one before. It must end at offset `room` or before."""
    if (batch.sequence, batch.salt, batch.previous_crc) != (segment.sequence, segment.salt, previous_crc):
        return False
    in_order = batch.first_lsn > last if offset == BLOCK else batch.first_lsn == last + 1
    return in_order and batch.payload_at + batch.payload_bytes <= room


def summary_of(segment, log, limit):
    """Offset and batch of each batch of the segment, by its summary; None if that is not valid."""
    data, footer = segment.data, segment.data[-56:]
    sequence, salt, headers_len = struct.unpack_from("<3Q", footer, 32)
    start, first = len(data) - blocks(headers_len + 56), len(data) - 56 - headers_len
    if footer[:8] != b"WALVSUMM" or struct.unpack_from("<I", footer, 8) != (VERSION,) or footer[16:32] != log:
        return None
    if (sequence, salt) != (segment.sequence, segment.salt) or len(data) - start > len(data) // 16:
        return None
    if struct.unpack_from("<I", footer, 12)[0] != crc32c(data[first:-44] + bytes(4) + data[-40:]):
        return None
    headers, batches = data[first:-56], []
    offset, previous_crc, last = BLOCK, segment.crc, segment.previous_lsn
    while headers:
        found = struct.unpack_from("<I", headers, 8) == (VERSION,) and batch_of(headers, 0, offset, segment, log)
        if not found or not follows(found[0], segment, offset, previous_crc, last, start):
            return None
        batch = found[0]
        batches.append((offset, batch))
        last, previous_crc = batch.last_lsn, batch.crc
        offset, headers = blocks(batch.payload_at + batch.payload_bytes), headers[found[1] :]
    return batches if last == limit else None


def blocks(length):
    """The length, rounded up to whole blocks."""
    return -(-length // BLOCK) * BLOCK


def payload_len(kind, sectors):
    return sectors * 512 if KINDS[kind] in ("write", "mark") else 0


def text_of(payload):
    """The text of a mark; None if that is none."""
    text = payload.rstrip(b"\0")
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        return None
    refused = any(c < " " or "\x7f" <= c <= "\x9f" or c in "\u2028\u2029" for c in decoded)
    return None if refused or len(payload) != 512 or not 1 <= len(text) <= 256 else decoded


def records_of(batch, segment, control):
    """The records of a batch; each knows whether its payload has its checksums."""
    at, checksums, found = batch.payload_at, iter(batch.checksums), []
    for lsn, (disk_id, kind, sector, sectors) in enumerate(batch.descriptors, batch.first_lsn):
        payload = segment.data[at : at + payload_len(kind, sectors)]
        damaged = [crc32c(payload[i : i + BLOCK]) != next(checksums) for i in range(0, len(payload), BLOCK)]
        found.append(
            {
                "lsn": lsn,
                "cid": batch.cid,
                "unix_us": batch.unix_us,
                "disk_id": disk_id,
                "disk": control.disks.get(disk_id, (0, ""))[1],
                "kind": KINDS[kind],
                "sector": 0 if KINDS[kind] == "rewind" else sector,
                "sectors": sectors,
                "payload_bytes": len(payload),
                "payload_crc32c": None if any(damaged) else crc32c(payload),
                "segment": segment.name,
                "payload_offset": at,
                "in_base": lsn <= max(control.checkpoint_lsn, control.void_lsn.get(disk_id, 0)),
                "undone": False,
                "damaged": any(damaged),
            }
        )
        if found[-1]["kind"] == "rewind":
            found[-1]["to_lsn"] = sector
        if found[-1]["kind"] == "mark":
            found[-1]["text"] = None if any(damaged) else text_of(payload)
        at += len(payload)
    return found


def read_from(first, candidates, control, durable, summaries):
    """Reads the segments from `first` on. Returns the batches, with their segment and offset, whether they are doubtful,
    and their records; how far the log was durable; the first segment that is not read; what to search where reading
    ended; and the first segment whose summary is not to be trusted."""
    batches, summarised = [], []
    for i, segment in enumerate(candidates[first:], first):
        last = segment.previous_lsn
        if i == 0 and (segment.previous_sequence >= control.first_sequence or last > control.checkpoint_lsn):
            return batches, durable, 0, [], None
        following = candidates[i + 1] if i + 1 < len(candidates) else None
        limit = following.previous_lsn if following and following.previous_sequence in (0, segment.sequence) else None
        listed = summary_of(segment, control.log, limit) if summaries and limit is not None else None
        if listed is not None:
            summarised.append((i, limit))
            for offset, batch in listed:
                batches.append((i, offset, batch, False, records_of(batch, segment, control)))
                durable = max(durable, batch.durable_lsn)
            continue
        offset, previous_crc = BLOCK, segment.crc
        while limit is None or last < limit:
            batch = batch_at(segment, offset, control.log)
            if batch is None or not follows(batch, segment, offset, previous_crc, last, len(segment.data)):
                break
            found = records_of(batch, segment, control)
            doubtful = any(record["damaged"] for record in found)
            if limit is not None and batch.last_lsn > limit:
                if doubtful:
                    break
                raise Damaged(f"{segment.name}: a batch goes to record {batch.last_lsn}, beyond the next segment's begin")
            batches.append((i, offset, batch, doubtful, found))
            durable = max(durable, batch.durable_lsn)
            last, previous_crc, offset = batch.last_lsn, batch.crc, blocks(batch.payload_at + batch.payload_bytes)
        if limit is None or last != limit:
            break
    distrusted = next((i for i, limit in summarised if limit > durable), None)
    if not candidates:
        return batches, durable, 0, [], None
    return batches, durable, i + 1, [(segment, offset, segment.salt)], distrusted


def undone(record, rewinds):
    """Whether its disk, as it is now, is made without this record."""
    end = float("inf")
    for rewind in reversed(rewinds):
        if rewind["disk_id"] == record["disk_id"] and rewind["lsn"] <= end:
            if record["lsn"] > rewind["lsn"]:
                break
            end = rewind["to_lsn"]
    return record["lsn"] > end


def read(directory):
    control = Control(os.path.join(directory, "control"))
    names = sorted(name for name in os.listdir(directory) if re.fullmatch(r"segment-\d{5,}", name))
    segments = [Segment(directory, name, control) for name in names]
    candidates = sorted((s for s in segments if s.state == "candidate"), key=lambda s: s.sequence)
    durable = min(max(control.checkpoint_lsn, control.copying_lsn), control.durable_lsn)
    batches, durable, ended, behind, distrusted = read_from(0, candidates, control, durable, True)
    if distrusted is not None:
        kept = [b for b in batches if b[0] < distrusted]
        batches, durable, ended, behind, _ = read_from(distrusted, candidates, control, durable, False)
        batches = kept + batches
    behind += [(s, BLOCK, None) for s in segments if s.state == "suspect"]
    # What was durable by the headers read is no longer doubtful; from the rest on, all is looked at again.
    doubtful = next((b for b in batches if b[3] and b[2].last_lsn > durable), None)
    if doubtful:
        first, offset = doubtful[:2]
        behind.append((candidates[first], offset, candidates[first].salt))
        behind += [(segment, BLOCK, segment.salt) for segment in candidates[first + 1 : ended]]
    behind += [(segment, BLOCK, None) for segment in candidates[ended:]]
    for segment, start, salt in behind:
        for offset in range(start, len(segment.data), BLOCK):
            batch = batch_at(segment, offset, control.log)
            if batch and batch.sequence >= control.first_sequence and salt in (None, batch.salt):
                durable = max(durable, batch.durable_lsn)
    durable = max(durable, control.durable_lsn)
    records, last = [], control.checkpoint_lsn
    for _, _, batch, is_doubtful, found in batches:
        if is_doubtful and batch.last_lsn > durable:
            break
        records += found
        last = max(last, batch.last_lsn)
    if durable > last:
        raise Damaged(f"records {last + 1} to {durable} were acknowledged and are missing")
    rewinds = [record for record in records if record["kind"] == "rewind" and record["lsn"] > control.checkpoint_lsn]
    for rewind in rewinds:
        if not control.checkpoint_lsn <= rewind["to_lsn"] < rewind["lsn"]:
            raise Damaged(f"record {rewind['lsn']} is an impossible rewind")
    for record in records:
        if record["kind"] in ("mark", "rewind"):
            continue
        record["undone"] = not record["in_base"] and undone(record, rewinds)
        size = control.disks.get(record["disk_id"], (0, ""))[0]
        if not record["in_base"] and not record["sector"] < record["sector"] + record["sectors"] <= size // 512:
            raise Damaged(f"record {record['lsn']} names no place on a disk of this log")
    return records


def saved_records(directory, lsn, count, control):
    """Disk, first sector and bytes of each record of the saved files of an LSN."""
    number, part, found = lsn, 0, []
    while number < lsn + count:
        file = SavedPart(directory, lsn, part, number, control)
        offset, previous_crc, before = BLOCK, file.crc, number
        while number < lsn + count:
            batch = batch_at(file, offset, control.log)
            # The first batch has no gap before it either.
            if not batch or batch.first_lsn != number + 1 or not follows(batch, file, offset, previous_crc, number, len(file.data)):
                break
            at, checksums = batch.payload_at, iter(batch.checksums)
            for disk_id, kind, sector, sectors in batch.descriptors:
                payload = file.data[at : at + payload_len(kind, sectors)]
                if any(crc32c(payload[i : i + BLOCK]) != next(checksums) for i in range(0, len(payload), BLOCK)):
                    raise Damaged(f"{file.name}: payload at byte {at}")
                found.append((disk_id, sector, payload if kind == 1 else bytes(512 * sectors)))
                at += len(payload)
            number, previous_crc, offset = batch.last_lsn, batch.crc, blocks(at)
        if number == before or number > lsn + count:
            raise Damaged(f"{file.name}: damaged at byte {offset}")
        part += 1
    return found


def base_of(directory, disk_id, image, control):
    """What the log's page calls the base image: with what the image could not take."""
    base = bytearray(open(image, "rb").read())
    if disk_id not in control.spilled:
        return base
    disk = control.uuids[disk_id]
    name = f"spill-{disk.hex()}.map"
    try:
        ranges = open(os.path.join(directory, name), "rb").read()
        spill = open(os.path.join(directory, name[:-4]), "rb").read()
    except FileNotFoundError:
        raise Damaged(f"{name}: it or its file is missing")
    if len(ranges) < 64 or not sealed(ranges, b"WALVSPIL") or ranges[16:48] != control.log + disk:
        raise Damaged(f"{name}: damaged")
    check_version(ranges, name, 1)
    (count,) = struct.unpack_from("<Q", ranges, 48)
    for i in range(count):
        sector, sectors = struct.unpack_from("<QQ", ranges, 56 + 16 * i)
        part = slice(512 * sector, 512 * (sector + sectors))
        base[part] = spill[part].ljust(512 * sectors, b"\0")
    return base


def as_of(directory, name, disk_id, image, out):
    """Writes a disk as of a snapshot."""
    control = Control(os.path.join(directory, "control"))
    lsn, saved = next((lsn, saved) for named, lsn, saved, only in control.snapshots if named == name and only in (0, disk_id))
    if lsn < control.since.get(disk_id, 0):
        raise Damaged(f"{name} is of another image of disk {disk_id}")
    disk = base_of(directory, disk_id, image, control)
    if saved:
        behind = {of: count for _, of, count, _ in control.snapshots if of >= lsn and count}
        # The oldest files count, so they are the last to be applied.
        for of in sorted(behind, reverse=True):
            records = [(at, data) for disk, at, data in saved_records(directory, of, behind[of], control) if disk == disk_id]
            for at, data in records:
                disk[512 * at : 512 * at + len(data)] = data
        if not records:
            raise Damaged(f"{name} does not have disk {disk_id}")
    else:
        for record in read(directory):
            if record["disk_id"] == disk_id and not record["in_base"] and record["lsn"] <= lsn:
                data = bytes(512 * record["sectors"])
                if record["kind"] == "write":
                    file = open(os.path.join(directory, record["segment"]), "rb")
                    file.seek(record["payload_offset"])
                    data = file.read(record["payload_bytes"])
                disk[512 * record["sector"] : 512 * record["sector"] + len(data)] = data
    open(out, "wb").write(disk)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 6):
        sys.exit(__doc__)
    try:
        if len(sys.argv) == 2:
            for line in read(sys.argv[1]):
                print(json.dumps(line))
        else:
            directory, name, disk_id, image, out = sys.argv[1:]
            as_of(directory, name, int(disk_id), image, out)
    except Damaged as error:
        sys.exit(f"damaged: {error}")
