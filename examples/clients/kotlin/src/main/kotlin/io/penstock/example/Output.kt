package io.penstock.example

/** Nobody reads the output any more. */
internal class BrokenPipe : Exception()

/** Writes the text to standard output at once. */
internal fun write(text: String) {
    print(text)
    if (System.out.checkError()) throw BrokenPipe()
}
