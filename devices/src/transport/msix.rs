//! MSI-X: the vector table, masks and pending bits of one PCI function (PCI Local Bus 3.0, 6.8.2).
//!
//! ```text
//!   trigger(v) ── enabled, not masked ──▶ router.trigger(v)
//!       └──────── masked ───────────────▶ pending bit ── unmask ──▶ router.set_route, router.trigger
//! ```

use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::interrupt::{INTERRUPT_CONFIG, INTERRUPT_QUEUE, Interrupt, MsiMessage, MsiRouter};
use crate::metrics::InterruptCounter;

/// Size of a table entry in bytes: address low and high, data, vector control.
pub(super) const ENTRY_LEN: u64 = 16;
/// Message Control: MSI-X Enable.
pub(super) const CONTROL_ENABLE: u16 = 1 << 15;
/// Message Control: Function Mask.
pub(super) const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
/// Vector Control: Mask Bit.
const VECTOR_MASKED: u32 = 1;

/// VIRTIO_MSI_NO_VECTOR: no interrupt for this event (virtio 1.2, 4.1.5.1.2).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// An entry of the vector table, with its pending bit.
#[derive(Clone, Copy, Debug)]
struct VectorEntry {
    message: MsiMessage,
    masked: bool,
    pending: bool,
    /// The message that the router was last given for this vector.
    routed: Option<MsiMessage>,
}

struct VectorTable {
    enabled: bool,
    function_masked: bool,
    entries: Vec<VectorEntry>,
}

/// The MSI-X state of a function.
pub(super) struct Msix {
    table: Mutex<VectorTable>,
    router: Arc<dyn MsiRouter>,
    counter: Arc<dyn InterruptCounter>,
}

impl Msix {
    /// A table of `vectors` entries, all masked, as after power-on.
    pub(super) fn new(
        vectors: u16,
        router: Arc<dyn MsiRouter>,
        counter: Arc<dyn InterruptCounter>,
    ) -> Self {
        let entry = VectorEntry {
            message: MsiMessage::default(),
            masked: true,
            pending: false,
            routed: None,
        };
        let entries = vec![entry; usize::from(vectors)];
        Self {
            table: Mutex::new(VectorTable {
                enabled: false,
                function_masked: false,
                entries,
            }),
            router,
            counter,
        }
    }

    fn table(&self) -> MutexGuard<'_, VectorTable> {
        // A panic leaves no partial change in the table.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of vectors.
    pub(super) fn vectors(&self) -> usize {
        self.table().entries.len()
    }

    /// Whether the driver uses MSI-X.
    fn enabled(&self) -> bool {
        self.table().enabled
    }

    /// Takes over the driver's value of Message Control.
    pub(super) fn set_control(&self, control: u16) {
        let mut table = self.table();
        table.enabled = control & CONTROL_ENABLE != 0;
        table.function_masked = control & CONTROL_FUNCTION_MASK != 0;
        for vector in 0..table.entries.len() {
            self.deliver(&mut table, vector);
        }
    }

    /// Raises `vector`, or keeps it pending while it is masked.
    pub(super) fn trigger(&self, vector: u16) {
        let mut table = self.table();
        // Without MSI-X there is nothing to send, and nothing becomes pending.
        if !table.enabled {
            return;
        }
        let vector = usize::from(vector);
        if let Some(entry) = table.entries.get_mut(vector) {
            entry.pending = true;
            self.deliver(&mut table, vector);
        }
    }

    /// Clears all pending bits.
    fn clear_pending(&self) {
        for entry in &mut self.table().entries {
            entry.pending = false;
        }
    }

    /// If a vector is unmasked, updates its route and sends it if it is pending.
    fn deliver(&self, table: &mut VectorTable, vector: usize) {
        let open = table.enabled && !table.function_masked;
        let Some(entry) = table
            .entries
            .get_mut(vector)
            .filter(|entry| open && !entry.masked)
        else {
            return;
        };
        // A table has at most 2048 entries.
        let number = vector as u16;
        if entry.routed != Some(entry.message) {
            entry.routed = match self.router.set_route(number, entry.message) {
                Ok(()) => Some(entry.message),
                Err(error) => {
                    let message = entry.message;
                    tracing::error!(%error, "cannot route MSI-X vector {number} to {message:x?}");
                    None
                }
            };
        }
        if std::mem::take(&mut entry.pending) && entry.routed.is_some() {
            match self.router.trigger(number) {
                Ok(()) => self.counter.count_interrupt(),
                Err(error) => tracing::error!(%error, "cannot raise MSI-X vector {number}"),
            }
        }
    }

    /// Reads the vector table. Only aligned accesses of 4 and 8 bytes are defined (6.8.2); others
    /// read 0.
    pub(super) fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !is_word_access(offset, data.len()) {
            return;
        }
        let table = self.table();
        for (index, word) in data.chunks_exact_mut(4).enumerate() {
            let at = offset + index as u64 * 4;
            let Some(entry) = table.entries.get((at / ENTRY_LEN) as usize) else {
                continue;
            };
            let value = match at % ENTRY_LEN {
                0 => entry.message.address as u32,
                4 => (entry.message.address >> 32) as u32,
                8 => entry.message.data,
                _ => u32::from(entry.masked) * VECTOR_MASKED,
            };
            word.copy_from_slice(&value.to_le_bytes());
        }
    }

    /// Writes the vector table. Only aligned accesses of 4 and 8 bytes have an effect.
    pub(super) fn write_table(&self, offset: u64, data: &[u8]) {
        if !is_word_access(offset, data.len()) {
            return;
        }
        let mut table = self.table();
        let vector = (offset / ENTRY_LEN) as usize;
        let Some(entry) = table.entries.get_mut(vector) else {
            return;
        };
        // An aligned access never reaches into the next entry.
        for (index, word) in data.chunks_exact(4).enumerate() {
            let value = word
                .iter()
                .rev()
                .fold(0, |value, &byte| value << 8 | u32::from(byte));
            match offset % ENTRY_LEN + index as u64 * 4 {
                0 => {
                    entry.message.address = entry.message.address & !0xffff_ffff | u64::from(value)
                }
                4 => {
                    entry.message.address =
                        entry.message.address & 0xffff_ffff | u64::from(value) << 32
                }
                8 => entry.message.data = value,
                _ => entry.masked = value & VECTOR_MASKED != 0,
            }
        }
        self.deliver(&mut table, vector);
    }

    /// Reads the pending bit array, 64 vectors to a quadword.
    pub(super) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        let table = self.table();
        for (index, byte) in data.iter_mut().enumerate() {
            let first = offset.saturating_add(index as u64).saturating_mul(8);
            *byte = (0..8)
                .filter(|bit| {
                    let vector = usize::try_from(first.saturating_add(*bit)).unwrap_or(usize::MAX);
                    table.entries.get(vector).is_some_and(|entry| entry.pending)
                })
                .fold(0, |byte, bit| byte | 1 << bit);
        }
    }
}

fn is_word_access(offset: u64, len: usize) -> bool {
    matches!(len, 4 | 8) && offset.is_multiple_of(len as u64)
}

/// The interrupts of a virtio-pci function: an MSI-X vector for each queue and one for the
/// configuration.
pub(super) struct PciInterrupt {
    pub(super) msix: Msix,
    isr: AtomicU8,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
}

impl PciInterrupt {
    pub(super) fn new(queues: u16, msix: Msix) -> Self {
        Self {
            msix,
            isr: AtomicU8::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
        }
    }

    /// Reads the ISR status, which clears it (virtio 1.2, 4.1.4.5).
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::SeqCst)
    }

    /// Whether the ISR status asks for an interrupt while MSI-X is off (4.1.4.5.1).
    pub(super) fn intx_asserted(&self) -> bool {
        !self.msix.enabled() && self.isr.load(Ordering::SeqCst) != 0
    }

    /// `config_msix_vector`.
    pub(super) fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::SeqCst)
    }

    /// Maps configuration changes to `vector`. A vector that does not exist becomes NO_VECTOR: the
    /// driver reads it back and sees the failure (4.1.5.1.2.2).
    pub(super) fn set_config_vector(&self, vector: u16) {
        self.config_vector
            .store(self.valid_vector(vector), Ordering::SeqCst);
    }

    /// `queue_msix_vector` of `queue`.
    pub(super) fn queue_vector(&self, queue: u32) -> u16 {
        self.queue_vectors
            .get(queue as usize)
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::SeqCst))
    }

    /// Maps `queue` to `vector`. Again, a vector that does not exist becomes NO_VECTOR.
    pub(super) fn set_queue_vector(&self, queue: u32, vector: u16) {
        if let Some(slot) = self.queue_vectors.get(queue as usize) {
            slot.store(self.valid_vector(vector), Ordering::SeqCst);
        }
    }

    /// `vector`, or NO_VECTOR if it does not exist.
    fn valid_vector(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.msix.vectors() {
            vector
        } else {
            NO_VECTOR
        }
    }
}

impl Interrupt for PciInterrupt {
    /// With MSI-X the vector reports the event; otherwise the ISR status does (4.1.4.5.1).
    fn queue(&self, queue: u16) {
        if self.msix.enabled() {
            self.msix.trigger(self.queue_vector(queue.into()));
        } else {
            self.isr.fetch_or(INTERRUPT_QUEUE as u8, Ordering::SeqCst);
        }
    }

    /// The ISR status reports a configuration change in either case, before the message is sent
    /// (4.1.4.5.1).
    fn config(&self) {
        self.isr.fetch_or(INTERRUPT_CONFIG as u8, Ordering::SeqCst);
        if self.msix.enabled() {
            self.msix.trigger(self.config_vector());
        }
    }

    fn reset(&self) {
        self.isr.store(0, Ordering::SeqCst);
        self.config_vector.store(NO_VECTOR, Ordering::SeqCst);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::SeqCst);
        }
        self.msix.clear_pending();
    }
}
