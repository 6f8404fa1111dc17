//! The part of msgpack that the protocol uses, and the values of its structs.

pub type Result<T> = std::result::Result<T, String>;

/// A value that a struct may have.
pub trait Wire: Sized {
    fn write(&self, out: &mut Vec<u8>);
    fn read(from: &mut Reader) -> Result<Self>;
}

/// msgpack's bin.
#[derive(Debug, Clone, PartialEq)]
pub struct Bytes(pub Vec<u8>);

/// A map of text, in the order of the wire.
#[derive(Debug, Clone, PartialEq)]
pub struct TextMap(pub Vec<(String, String)>);

pub struct Reader<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(data: &'a [u8]) -> Self {
        Reader { data, at: 0 }
    }

    pub fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        if count > self.data.len() - self.at {
            return Err(format!("{count} bytes announced, {} left", self.data.len() - self.at));
        }
        let found = &self.data[self.at..self.at + count];
        self.at += count;
        Ok(found)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn unsigned(&mut self, width: usize) -> Result<u64> {
        Ok(self.take(width)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn length(&mut self, small: (u8, u8), wide: &[(u8, usize)], what: &str) -> Result<usize> {
        let kind = self.byte()?;
        if kind & small.1 == small.0 {
            return Ok((kind & !small.1) as usize);
        }
        match wide.iter().find(|(code, _)| *code == kind) {
            Some((_, width)) => Ok(self.unsigned(*width)? as usize),
            None => Err(format!("byte {kind:#04x}, where {what} was expected")),
        }
    }

    /// Read the header of an array. Each element has at least a byte, so a longer one is refused.
    pub fn array(&mut self) -> Result<usize> {
        let count = self.length((0x90, 0xf0), &[(0xdc, 2), (0xdd, 4)], "an array")?;
        if count > self.data.len() - self.at {
            return Err(format!("an array of {count} in {} bytes", self.data.len() - self.at));
        }
        Ok(count)
    }

    pub fn fields(&mut self, count: usize, name: &str) -> Result<()> {
        match self.array()? {
            found if found == count => Ok(()),
            found => Err(format!("{name} has {count} fields, not {found}")),
        }
    }

    /// The length of the next element if it is an array: 2 is a request that failed as a whole.
    pub fn peek_array(&self) -> Option<usize> {
        Reader { data: self.data, at: self.at }.array().ok()
    }

    pub fn nil(&mut self) -> bool {
        let is_nil = self.data.get(self.at) == Some(&0xc0);
        self.at += is_nil as usize;
        is_nil
    }

    pub fn end(&self) -> Result<()> {
        match self.data.len() - self.at {
            0 => Ok(()),
            left => Err(format!("{left} bytes are left")),
        }
    }
}

pub fn write_array(count: usize, out: &mut Vec<u8>) {
    match count {
        0..=15 => out.push(0x90 | count as u8),
        16..=0xffff => out.extend([&[0xdc][..], &(count as u16).to_be_bytes()].concat()),
        _ => out.extend([&[0xdd][..], &(count as u32).to_be_bytes()].concat()),
    }
}

impl Wire for i64 {
    fn write(&self, out: &mut Vec<u8>) {
        match *self {
            -32..=127 => out.push(*self as u8),
            number => {
                out.push(0xd3);
                out.extend(number.to_be_bytes());
            }
        }
    }

    fn read(from: &mut Reader) -> Result<Self> {
        let kind = from.byte()?;
        match kind {
            0..=0x7f | 0xe0..=0xff => Ok(i64::from(kind as i8)),
            0xcc..=0xcf => {
                i64::try_from(from.unsigned(1 << (kind - 0xcc))?).map_err(|error| error.to_string())
            }
            0xd0..=0xd3 => {
                let width = 1usize << (kind - 0xd0);
                let shift = 64 - 8 * width as u32;
                Ok((from.unsigned(width)? << shift) as i64 >> shift)
            }
            _ => Err(format!("byte {kind:#04x}, where an integer was expected")),
        }
    }
}

impl Wire for bool {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(if *self { 0xc3 } else { 0xc2 });
    }

    fn read(from: &mut Reader) -> Result<Self> {
        match from.byte()? {
            0xc2 => Ok(false),
            0xc3 => Ok(true),
            kind => Err(format!("byte {kind:#04x}, where a boolean was expected")),
        }
    }
}

impl Wire for String {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(0xdb);
        out.extend((self.len() as u32).to_be_bytes());
        out.extend(self.as_bytes());
    }

    fn read(from: &mut Reader) -> Result<Self> {
        let length = from.length((0xa0, 0xe0), &[(0xd9, 1), (0xda, 2), (0xdb, 4)], "text")?;
        String::from_utf8(from.take(length)?.to_vec()).map_err(|error| error.to_string())
    }
}

impl Wire for Bytes {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(0xc6);
        out.extend((self.0.len() as u32).to_be_bytes());
        out.extend(&self.0);
    }

    fn read(from: &mut Reader) -> Result<Self> {
        let length = from.length((0xff, 0xff), &[(0xc4, 1), (0xc5, 2), (0xc6, 4)], "bytes")?;
        Ok(Bytes(from.take(length)?.to_vec()))
    }
}

impl Wire for TextMap {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(0xdf);
        out.extend((self.0.len() as u32).to_be_bytes());
        for (key, value) in &self.0 {
            key.write(out);
            value.write(out);
        }
    }

    fn read(from: &mut Reader) -> Result<Self> {
        let count = from.length((0x80, 0xf0), &[(0xde, 2), (0xdf, 4)], "a map")?;
        let mut pairs: Vec<(String, String)> = Vec::new();
        for _ in 0..count {
            let key = String::read(from)?;
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(format!("the key {key} twice"));
            }
            pairs.push((key, String::read(from)?));
        }
        Ok(TextMap(pairs))
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn write(&self, out: &mut Vec<u8>) {
        write_array(self.len(), out);
        self.iter().for_each(|each| each.write(out));
    }

    fn read(from: &mut Reader) -> Result<Self> {
        let count = from.array()?;
        (0..count).map(|_| T::read(from)).collect()
    }
}

impl<T: Wire> Wire for Option<T> {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            None => out.push(0xc0),
            Some(value) => value.write(out),
        }
    }

    fn read(from: &mut Reader) -> Result<Self> {
        if from.nil() {
            return Ok(None);
        }
        T::read(from).map(Some)
    }
}
