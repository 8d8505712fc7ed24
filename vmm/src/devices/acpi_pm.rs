//! ACPI fixed hardware (ACPI 6.5, 4.8.3): PM1 events, PM1 control with power off, and the timer.
//!
//! ```text
//!   0  PM1 status: the power button    4  PM1 control: SCI_EN, SLP_TYP, SLP_EN
//!   2  PM1 enable                      8  timer, 3.579545 MHz, 32 bits
//! ```
//!
//! The VMM emulates fixed hardware rather than hardware-reduced ACPI, so that Linux keeps its timer
//! and interrupt controllers as on any PC. The SCI is a level: it is high while an event is both
//! pending and enabled.

use std::sync::Arc;
use std::time::Instant;

pub use crate::arch::x86_64::layout::{
    ACPI_PM_CONTROL as CONTROL, ACPI_PM_TIMER as TIMER, SLEEP_TYPE_S5,
};

use crate::bus::BusDevice;
use crate::control::{RunControl, RunEnd};

/// Bytes of all registers together.
pub const SIZE: u64 = 12;
/// The value that powers off when the guest writes it to the PM1 control register.
pub const POWER_OFF: u16 = (SLEEP_TYPE_S5 as u16) << SLEEP_TYPE_SHIFT | SLEEP_ENABLE;

const PM1_STATUS: u64 = 0;
const PM1_ENABLE: u64 = 2;
/// PWRBTN_STS and PWRBTN_EN.
const POWER_BUTTON: u16 = 1 << 8;
const SCI_ENABLED: u16 = 1;
const SLEEP_TYPE_SHIFT: u32 = 10;
const SLEEP_ENABLE: u16 = 1 << 13;
const TIMER_HERTZ: u128 = 3_579_545;

/// The registers.
pub struct AcpiPm {
    control: Arc<RunControl>,
    /// Sets the level of the SCI.
    sci: Box<dyn Fn(bool) + Send>,
    level: bool,
    started: Instant,
    status: u16,
    enabled: u16,
    pm1_control: u16,
}

impl AcpiPm {
    /// The registers. A power off ends the run of `control`; `sci` sets the level of their
    /// interrupt.
    pub fn new(control: Arc<RunControl>, sci: Box<dyn Fn(bool) + Send>) -> Self {
        Self {
            control,
            sci,
            level: false,
            started: Instant::now(),
            status: 0,
            enabled: 0,
            pm1_control: SCI_ENABLED,
        }
    }

    /// Presses the power button. Returns `false` if the guest has not enabled its event.
    pub fn press_power_button(&mut self) -> bool {
        let heard = self.enabled & POWER_BUTTON != 0;
        if heard {
            self.status |= POWER_BUTTON;
            self.interrupt();
        }
        heard
    }

    fn interrupt(&mut self) {
        let level = self.status & self.enabled != 0;
        if std::mem::replace(&mut self.level, level) != level {
            (self.sci)(level);
        }
    }

    /// The current value of all registers, for reads of any width and alignment.
    fn bytes(&self) -> [u8; SIZE as usize] {
        let ticks = self.started.elapsed().as_nanos() * TIMER_HERTZ / 1_000_000_000;
        let mut bytes = [0; SIZE as usize];
        bytes[..2].copy_from_slice(&self.status.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.enabled.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.pm1_control.to_le_bytes());
        bytes[8..12].copy_from_slice(&(ticks as u32).to_le_bytes());
        bytes
    }
}

impl BusDevice for AcpiPm {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        let bytes = self.bytes();
        for (index, byte) in (offset as usize..).zip(data) {
            *byte = bytes.get(index).copied().unwrap_or(0xff);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let value = match *data {
            [low, high, ..] => u16::from_le_bytes([low, high]),
            _ => return,
        };
        match offset {
            // Each bit that is written as 1 clears its status bit.
            PM1_STATUS => {
                self.status &= !value;
                self.interrupt();
            }
            PM1_ENABLE => {
                self.enabled = value;
                self.interrupt();
            }
            CONTROL => {
                self.pm1_control = value & !SLEEP_ENABLE | SCI_ENABLED;
                let sleep_type = (value >> SLEEP_TYPE_SHIFT & 7) as u8;
                if value & SLEEP_ENABLE != 0 && sleep_type == SLEEP_TYPE_S5 {
                    self.control.end(RunEnd::PowerOff);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_s5_with_sleep_enable_powers_off() {
        let control = Arc::new(RunControl::new().unwrap());
        let mut pm = AcpiPm::new(control.clone(), Box::new(|_| {}));
        pm.write(CONTROL, &(5u16 << 10).to_le_bytes());
        pm.write(CONTROL, &(1u16 << 10 | SLEEP_ENABLE).to_le_bytes());
        assert!(control.end_reason().is_none());
        let mut value = [0; 2];
        pm.read(CONTROL, &mut value);
        assert_eq!(u16::from_le_bytes(value), 1 << 10 | SCI_ENABLED);
        pm.write(CONTROL, &(5u16 << 10 | SLEEP_ENABLE).to_le_bytes());
        assert!(matches!(control.end_reason(), Some(RunEnd::PowerOff)));
        assert!(control.is_stopping());
    }

    #[test]
    fn the_power_button_interrupts_a_guest_that_enabled_it_until_it_is_acknowledged() {
        let levels = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = levels.clone();
        let sci = Box::new(move |level| seen.lock().unwrap().push(level));
        let mut pm = AcpiPm::new(Arc::new(RunControl::new().unwrap()), sci);
        assert!(!pm.press_power_button());
        pm.write(PM1_ENABLE, &POWER_BUTTON.to_le_bytes());
        assert!(levels.lock().unwrap().is_empty());
        assert!(pm.press_power_button() && pm.press_power_button());
        let mut status = [0; 2];
        pm.read(PM1_STATUS, &mut status);
        assert_eq!(u16::from_le_bytes(status), POWER_BUTTON);
        assert_eq!(*levels.lock().unwrap(), [true]);
        pm.write(PM1_STATUS, &(!POWER_BUTTON).to_le_bytes());
        pm.write(PM1_STATUS, &POWER_BUTTON.to_le_bytes());
        assert_eq!(*levels.lock().unwrap(), [true, false]);
    }

    #[test]
    fn the_timer_counts() {
        let mut pm = AcpiPm::new(Arc::new(RunControl::new().unwrap()), Box::new(|_| {}));
        let mut read = || {
            let mut data = [0; 4];
            pm.read(TIMER, &mut data);
            u32::from_le_bytes(data)
        };
        let first = read();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(read().wrapping_sub(first) >= 7159);
    }
}
